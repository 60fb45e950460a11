from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.captions.export import export_captions
from pipeline.errors import DatasetError, PathIsolationError
from pipeline.raw_images.stage import scan
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.storage.tables import Tables
from pipeline.validated_dataset.stage import validate
from tests.pipeline.captions.conftest import picture


def quiet(_: str) -> None: ...


def dataset(folder: Path, *names: str) -> Recipe:
    (folder / "photos" / "deep").mkdir(parents=True)
    for seed, name in enumerate(names):
        picture(seed).save(folder / "photos" / name)
    captions: dict[str, Any] = {"from": "filename", "prefix": "sks, "}
    values = {
        "datasets": [{"name": "mine", "path": str(folder / "photos"), "captions": captions}],
        "output_dir": str(folder / "output"),
        "model": {"base": "owner/name"},
    }
    recipe = recipe_from_mapping("x", values)
    tables = Tables(recipe.output_dir)
    result = validate(recipe, scan(recipe, tables, log=quiet).table, tables, log=quiet)
    tables.write("validated_dataset", result.table)
    return recipe


def test_each_image_has_a_file_with_its_final_caption(tmp_path: Path) -> None:
    recipe = dataset(tmp_path, "rose.png", "deep/lily.png")
    assert export_captions(recipe, tmp_path / "texts") == 2
    files = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "texts").rglob("*.txt")}
    assert files == {"rose.txt": "sks, rose\n", "lily.txt": "sks, lily\n"}
    assert (tmp_path / "texts" / "mine" / "deep" / "lily.txt").is_file()


def test_captions_are_not_exported_into_a_dataset_nor_over_each_other(tmp_path: Path) -> None:
    recipe = dataset(tmp_path, "rose.png")
    for folder in (tmp_path / "photos", tmp_path / "photos" / "deep", tmp_path):
        with pytest.raises(PathIsolationError, match="apart from the dataset mine"):
            export_captions(recipe, folder)

    # The name of the file is the caption, which ends before the suffix.
    twice = dataset(tmp_path / "two", "rose.v1.png", "rose.v1.webp")
    assert export_captions(twice, tmp_path / "texts") == 1
    table = Tables(twice.output_dir).read("validated_dataset")
    captions = ["one", "two"]
    Tables(twice.output_dir).write(
        "validated_dataset", table.with_columns(caption=table["caption"].scatter([0, 1], captions))
    )
    with pytest.raises(DatasetError, match="would have one file"):
        export_captions(twice, tmp_path / "texts")
