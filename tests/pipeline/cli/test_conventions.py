"""Paths given on the command line, converted to paths in a recipe."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import click
import fsspec
import pytest
from click.testing import CliRunner

from pipeline.cli.conventions import RECIPE_WITH_OUTPUTS, as_recipe_path, bytes_text, seconds_text
from pipeline.cli.main import latentline
from pipeline.errors import StoreError, TableError
from pipeline.recipe import Recipe, project_root
from pipeline.storage import retry
from pipeline.storage.atomic import write_text


def test_a_folder_in_the_project_becomes_relative_to_the_project_root(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(project_root() / "pipeline")
    assert as_recipe_path("models") == "pipeline/models"


def test_a_folder_outside_the_project_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert as_recipe_path("model") == str(tmp_path / "model")


def test_a_hub_id_is_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert as_recipe_path("owner/name") == "owner/name"


@pytest.mark.parametrize(
    ("number", "text"), [(712, "712 bytes"), (2560, "2.56 kB"), (999_600, "1 MB"), (1_400_000, "1.4 MB")]
)
def test_sizes_use_powers_of_1000(number: int, text: str) -> None:
    assert bytes_text(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0.4 s"), (720.0, "12 min"), (12_600.0, "3.5 h")])
def test_durations_use_the_largest_suitable_unit(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    "arguments",
    [
        ["new", "roses", "--images", "nowhere"],
        ["provenance", "."],
        ["convert-checkpoint", "nowhere.safetensors", "models/nowhere"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_command_without_a_recipe_reports_broken_recipes_in_one_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LATENTLINE_CONFIGS", str(tmp_path / "configs"))
    assert "excluded" not in CliRunner().invoke(latentline, arguments).stderr
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "broken.yaml").write_text("datasets: 1", encoding="utf-8")
    [line] = CliRunner().invoke(latentline, arguments).stderr.splitlines()
    assert line.startswith("warning: recipe broken is excluded: ")


@pytest.mark.parametrize("fails", [True, False], ids=["failing_command", "good_command"])
def test_the_error_of_a_command_matters_more_than_that_of_its_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    monkeypatch.setattr(retry, "RETRY_S", 0.0)
    address = f"memory://{uuid.uuid4().hex}/out"
    file = tmp_path / "roses.yaml"
    values = {
        "datasets": [{"name": "photos", "path": str(tmp_path / "photos")}],
        "cache_dir": str(tmp_path / "cache"),
        "output_dir": address,
        "model": {"base": "owner/name"},
    }
    file.write_text(json.dumps(values), encoding="utf-8")

    @click.command()
    @click.argument("recipe", type=RECIPE_WITH_OUTPUTS)
    def command(recipe: Recipe) -> None:
        write_text(recipe.output_dir / "reports" / "fit_buckets" / "report.html", "a result")
        # A file in place of the folder: nothing can be written below it.
        fsspec.filesystem("memory").pipe_file(address.removeprefix("memory:/"), b"")
        if fails:
            raise TableError("the first error", where="here", fix="nothing")

    result = CliRunner().invoke(command, [str(file)])
    assert isinstance(result.exception, TableError if fails else StoreError)
    assert ("warning: the results are not uploaded yet: " in result.stderr) == fails
