"""`latentline new` reads captions of many images from one file, and says loudly if there are none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner

from pipeline.cli.new import command as new
from pipeline.errors import DatasetError
from pipeline.raw_images.stage import scan
from pipeline.recipe import Recipe
from pipeline.storage.tables import Tables
from pipeline.validated_dataset.stage import validate
from tests.pipeline.new_recipe.foreign_projects import images, taken_over

CAPTIONS = {"0.png": "a red rose", "1.png": "a dog, tired", "2.png": 'a 3" nail'}


def trained_captions(recipe: Recipe, root: Path) -> dict[str, str]:
    """Return the captions by image path, as the first two stages read them."""
    recipe = recipe.model_copy(update={"output_dir": root / "out"})
    tables = Tables(recipe.output_dir)
    table = validate(recipe, scan(recipe, tables, log=str).table, tables, log=str).table
    return dict(table.select("path", "caption").rows())


def rows(path: str, caption: str) -> list[dict[str, str]]:
    return [{path: name, caption: text, "license": "none"} for name, text in CAPTIONS.items()]


def put(file: Path, content: Any) -> None:
    """Write a manifest or a JSON file, by its suffix."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".jsonl":
        file.write_text("".join(f"{json.dumps(row)}\n" for row in content), encoding="utf-8")
    elif file.suffix == ".csv":
        pl.DataFrame(content).write_csv(file)
    elif file.suffix == ".parquet":
        pl.DataFrame(content).write_parquet(file)
    else:
        file.write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "path_column", "caption_column"),
    [
        ("metadata.jsonl", "file_name", "text"),
        ("metadata.csv", "file_name", "caption"),
        ("metadata.parquet", "image_path", "description"),
        ("my list.jsonl", "img", "tags"),
    ],
)
def test_C13_a_manifest_with_captions_becomes_the_dataset(
    configs: Path, tmp_path: Path, name: str, path_column: str, caption_column: str
) -> None:
    folder = images(tmp_path / "roses", 4)
    put(folder / name, rows(path_column, caption_column))
    recipe, output = taken_over(configs, folder)
    (dataset,) = recipe.datasets
    assert (dataset.path, dataset.root, dataset.path_column) == (folder / name, folder, path_column)
    assert dataset.captions.columns == (caption_column,)
    assert trained_captions(recipe, tmp_path) == CAPTIONS
    assert recipe.preview_captions == ["a red rose"]
    assert f"3 images, captions from {folder / name}, '{caption_column}'" in output
    assert "1 image without a caption in that file" in output
    assert "WARNING" not in output


META = {name: {"caption": text, "tags": "tag"} for name, text in CAPTIONS.items()}


@pytest.mark.parametrize(
    ("content", "more"),
    [
        (CAPTIONS, ""),
        (META, ", tag"),
        ({name.removesuffix(".png"): value for name, value in META.items()}, ", tag"),
        ({f"/other/machine/{name}": {"tags": text} for name, text in CAPTIONS.items()}, ""),
        ({f"C:\\photos\\{name}": [text] for name, text in CAPTIONS.items()}, ""),
        (rows("image", "prompt"), ""),
        (
            {
                "images": [{"id": number, "file_name": name} for number, name in enumerate(CAPTIONS)],
                "annotations": [
                    {"image_id": number, "caption": text} for number, text in enumerate(CAPTIONS.values())
                ],
            },
            "",
        ),
    ],
    ids=["map", "meta_cap", "without suffix", "absolute", "windows", "list", "coco"],
)
@pytest.mark.parametrize("is_file", [False, True], ids=["folder", "file"])
def test_C13_captions_in_json_become_a_manifest_next_to_the_recipe(
    configs: Path, tmp_path: Path, content: Any, more: str, is_file: bool
) -> None:
    folder = images(tmp_path / "roses", 3)
    put(folder / "captions.json", content)
    before = sorted(each.name for each in folder.iterdir())
    recipe, output = taken_over(configs, folder / "captions.json" if is_file else folder)
    (dataset,) = recipe.datasets
    assert (dataset.path, dataset.images) == (configs / "roses_roses_captions.jsonl", folder)
    assert trained_captions(recipe, tmp_path) == {name: f"{text}{more}" for name, text in CAPTIONS.items()}
    assert sorted(each.name for each in folder.iterdir()) == before
    assert f"wrote {dataset.path}" in output


def test_C13_each_sub_folder_may_have_its_own_file(configs: Path, tmp_path: Path) -> None:
    for name in ("train", "more"):
        images(tmp_path / "roses" / name, 3)
        put(tmp_path / "roses" / name / "metadata.jsonl", rows("file_name", "text"))
    images(tmp_path / "roses" / "bare", 2)
    recipe, output = taken_over(configs, tmp_path / "roses")
    assert [each.name for each in recipe.datasets] == ["more", "train"]
    assert "2 images without a caption in that file" in output


def test_C13_entries_without_an_image_and_damaged_files_are_reported(configs: Path, tmp_path: Path) -> None:
    folder = images(tmp_path / "roses", 3)
    put(folder / "metadata.jsonl", [*rows("file_name", "text"), {"file_name": "gone.png", "text": "x"}])
    (folder / "broken.json").write_text("{", encoding="utf-8")
    _, output = taken_over(configs, folder)
    assert f"{folder / 'metadata.jsonl'}: 1 entry without an image" in output
    assert f"{folder / 'broken.json'}: the file cannot be read" in output


def test_C13_text_files_of_more_images_are_preferred_and_the_other_file_is_named(
    configs: Path, tmp_path: Path
) -> None:
    folder = images(tmp_path / "roses", 3, ".txt")
    put(folder / "captions.json", {"0.png": "another"})
    put(folder / "0.json", {"caption": "of one image"})
    recipe, output = taken_over(configs, folder)
    assert recipe.datasets[0].captions.from_ == "sidecar"
    assert f"{folder / 'captions.json'}: captions of 1 image; more images have text files" in output


def test_C13_without_any_captions_the_last_lines_say_so(configs: Path, tmp_path: Path) -> None:
    folder = images(tmp_path / "roses", 3)
    put(folder / "labels.csv", [{"file_name": "0.png", "width": "8"}])
    _, output = taken_over(configs, folder)
    warning = (
        f"WARNING: no captions were found for {folder}: all of its 3 images get the caption 'a photograph'"
    )
    assert warning in output
    assert output.index("wrote ") < output.index("WARNING") < output.index("next: ")
    assert output.index("next: ") < output.index("latentline diagnose roses") < output.rindex("then: ")


def test_C13_images_without_a_text_file_are_reported(configs: Path, tmp_path: Path) -> None:
    folder = images(tmp_path / "roses", 3, ".txt")
    (folder / "1.txt").unlink()
    _, output = taken_over(configs, folder)
    assert "1 of 3 images have no caption; set captions.fallback" in output


def test_C13_a_manifest_of_other_images_is_an_error(configs: Path, tmp_path: Path) -> None:
    images(tmp_path / "roses", 3)
    put(tmp_path / "roses" / "metadata.jsonl", [{"file_name": "gone.png", "text": "x"}])
    arguments = ["roses", "--images", str(tmp_path / "roses" / "metadata.jsonl")]
    with pytest.raises(DatasetError, match="names no image next to it") as caught:
        CliRunner().invoke(new, arguments, catch_exceptions=False)
    assert "caption, text" in caught.value.fix
    assert not configs.exists()


def test_C13_an_existing_manifest_is_never_overwritten(configs: Path, tmp_path: Path) -> None:
    folder = images(tmp_path / "roses", 3)
    put(folder / "captions.json", CAPTIONS)
    configs.mkdir()
    (configs / "roses_roses_captions.jsonl").write_text("mine")
    with pytest.raises(Exception, match="never overwritten"):
        CliRunner().invoke(new, ["roses", "--images", str(folder)], catch_exceptions=False)
    assert (configs / "roses_roses_captions.jsonl").read_text() == "mine"
    assert not (configs / "roses.yaml").exists()


SECRET = "s3cr3t-token"


@pytest.mark.parametrize(
    ("link", "target", "content"),
    [
        ("captions.json", "credentials.json", {"0.png": SECRET, "refresh_token": SECRET}),
        ("meta_cap.json", "credentials.json", {"0": {"caption": SECRET}}),
        ("captions.json", "credentials.json", [{"file_name": "0.png", "text": SECRET}]),
        ("metadata.jsonl", "rows.jsonl", [{"file_name": "0.png", "text": SECRET}]),
        ("0.txt", "token", SECRET),
        ("0.caption", "token", SECRET),
    ],
)
@pytest.mark.parametrize("is_relative", [False, True])
def test_I19_no_text_is_taken_through_a_link_out_of_the_folder(
    configs: Path, tmp_path: Path, link: str, target: str, content: Any, is_relative: bool
) -> None:
    """It would be published with the LoRA, as a caption or as a prompt of previews."""
    folder = images(tmp_path / "roses", 3)
    secret = tmp_path / "home" / target
    secret.parent.mkdir()
    secret.write_text(content) if isinstance(content, str) else put(secret, content)
    (folder / link).symlink_to(Path("../home") / target if is_relative else secret)
    (folder / "refresh_token.png").write_bytes((folder / "0.png").read_bytes())
    _, output = taken_over(configs, folder)
    assert SECRET not in output + "".join(each.read_text() for each in configs.iterdir())
    if link.endswith((".json", ".jsonl")):
        assert f"{folder / link}: the " in output
        assert "outside the dataset's folder; replace the link with the file itself" in output


@pytest.mark.timeout(60)
def test_special_and_huge_files_are_not_read(configs: Path, tmp_path: Path) -> None:
    folder = images(tmp_path / "roses", 3)
    os.mkfifo(folder / "0.txt")
    with (folder / "captions.json").open("wb") as file:
        file.truncate(20 * 10**9)
    _, output = taken_over(configs, folder)
    assert "it must have at most 1,000,000,000 bytes, got 20,000,000,000" in output
