"""Paths given on the command line, converted to paths in a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli.conventions import as_recipe_path, bytes_text, seconds_text
from pipeline.cli.main import latentline
from pipeline.recipe import project_root


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


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0.4 s"), (112.0, "112 s"), (720.0, "12 min"), (12_600.0, "3.5 h")]
)
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
