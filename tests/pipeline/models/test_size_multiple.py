"""Bucket edges that do not suit the base model are found when recipes load."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from demo.tiny_models import make_tiny_flux
from pipeline.errors import RecipeError
from pipeline.models.size_multiple import local_family, require_size_multiple
from pipeline.recipe import Recipe, load_recipe_folder

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with a size multiple of 16."""
    folder = tmp_path_factory.mktemp("base") / "flux"
    make_tiny_flux(folder)
    return folder


def recipes(folder: Path, base: Path | str, **buckets: str) -> list[Recipe]:
    for name, settings in buckets.items():
        (folder / f"{name}.yaml").write_text(
            f"datasets: [{{name: d, path: {folder}/photos}}]\noutput_dir: {folder}/{name}\n"
            f"cache_dir: {folder}/cache\nmodel:\n  base: {base}\nbuckets:\n  {settings}\n",
            encoding="utf-8",
        )
    return load_recipe_folder(folder).recipes


@pytest.mark.parametrize(
    ("buckets", "key"),
    [
        ("{resolution: 64, step: 8}", "buckets.step"),
        ("{sizes: [64x64, 64x72]}", "buckets.sizes"),
        ("{sizes: [64x64], step: 8, upscale: never}", "buckets.step"),
    ],
    ids=["ladder", "sizes", "small images' own buckets"],
)
def test_B03_edges_that_are_not_multiples_are_an_error_with_line_and_multiple(
    tmp_path: Path, flux: Path, buckets: str, key: str
) -> None:
    with pytest.raises(RecipeError) as excinfo:
        require_size_multiple(recipes(tmp_path, flux, one=buckets))
    assert excinfo.value.where == f"{tmp_path / 'one.yaml'}:7, {key}"
    assert "16" in excinfo.value.what
    assert "16" in excinfo.value.fix


@pytest.mark.parametrize(
    "buckets",
    [
        "{resolution: 64, step: 16}",
        "{sizes: [64x64, 48x80], step: 8}",
        "{resolution: 64, step: 16, upscale: never}",
    ],
)
def test_edges_that_are_multiples_pass(tmp_path: Path, flux: Path, buckets: str) -> None:
    require_size_multiple(recipes(tmp_path, flux, one=buckets))


def test_every_wrong_recipe_is_listed(tmp_path: Path, flux: Path) -> None:
    wrong = "{resolution: 64, step: 8}"
    loaded = recipes(tmp_path, flux, one=wrong, good="{resolution: 64, step: 16}", two=wrong)
    with pytest.raises(RecipeError) as excinfo:
        require_size_multiple(loaded)
    assert "2 mistakes" in excinfo.value.what
    assert "one.yaml" in excinfo.value.what
    assert "two.yaml" in excinfo.value.what


@pytest.mark.parametrize("base", ["nobody/nothing", "models/none"])
def test_a_model_that_is_not_on_this_machine_is_not_checked(tmp_path: Path, base: str) -> None:
    loaded = recipes(tmp_path, base, one="{resolution: 64, step: 8}")
    assert local_family(loaded[0]) is None
    require_size_multiple(loaded)


def test_an_unsupported_model_is_not_checked(tmp_path: Path) -> None:
    (tmp_path / "video").mkdir()
    (tmp_path / "video" / "model_index.json").write_text('{"_class_name": "VideoPipeline"}')
    require_size_multiple(recipes(tmp_path, tmp_path / "video", one="{resolution: 64, step: 8}"))


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["-c", "from pipeline.cli.main import main; main()", "validate", "one"], 1),
        (["-c", "from assets.definitions import defs; defs()"], 0),
    ],
    ids=["latentline validate", "definitions"],
)
def test_B03_the_command_and_the_definitions_report_the_error(
    tmp_path: Path, flux: Path, command: list[str], status: int
) -> None:
    recipes(tmp_path, flux, one="{resolution: 64, step: 8}")
    environment: dict[str, Any] = {**os.environ, "LATENTLINE_CONFIGS": str(tmp_path)}
    completed = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert completed.returncode == status
    assert "one.yaml:7, buckets.step" in completed.stderr
    assert "multiple of 16" in completed.stderr
