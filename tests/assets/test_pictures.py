"""Pictures in the metadata of a materialization."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
from dagster import AssetKey, AssetSelection, DagsterInstance, MetadataValue, materialize
from PIL import Image

from assets.definitions import build_definitions
from assets.pictures import MAX_PICTURE_BYTES, MAX_PICTURES_BYTES, captioned_pictures, picture_metadata
from tests.small_recipe import small_recipe


def test_pictures_are_shown_by_name_and_other_files_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "crops.jpg").write_bytes(b"\xff\xd8 a picture")
    (tmp_path / "sizes.png").write_bytes(b"\x89PNG another")
    (tmp_path / "buckets.parquet").write_bytes(b"no picture")
    metadata = picture_metadata(tmp_path)
    assert list(metadata) == ["picture_crops", "picture_sizes"]
    text = str(metadata["picture_crops"].value)
    start = "![crops](data:image/jpeg;base64,"
    assert text.startswith(start)
    assert base64.b64decode(text[len(start) : -1]) == b"\xff\xd8 a picture"


def embedded_size(value: MetadataValue[Any]) -> int:
    return len(base64.b64decode(str(value.value).partition("base64,")[2].rstrip(")")))


def test_the_pictures_of_an_asset_share_one_size_limit(tmp_path: Path) -> None:
    """Dagster stores them in its event log with each materialization, so large sheets are reduced there."""
    noise = np.random.default_rng(0).integers(0, 256, (900, 900, 3), dtype=np.uint8)
    for name in ("before.jpg", "sheet.jpg"):
        Image.fromarray(noise).save(tmp_path / name, quality=95)
    (tmp_path / "curve.png").write_bytes(b"x" * 10)
    (tmp_path / "large.png").write_bytes(b"x" * MAX_PICTURES_BYTES)
    original_bytes = (tmp_path / "sheet.jpg").stat().st_size
    assert original_bytes > MAX_PICTURES_BYTES

    metadata = picture_metadata(tmp_path)
    assert list(metadata) == ["picture_before", "picture_curve", "picture_sheet"]
    sizes = {name: embedded_size(value) for name, value in metadata.items()}
    assert sizes["picture_curve"] == 10
    assert sum(sizes.values()) <= MAX_PICTURES_BYTES
    assert min(sizes["picture_before"], sizes["picture_sheet"]) > MAX_PICTURES_BYTES // 8
    assert (tmp_path / "sheet.jpg").stat().st_size == original_bytes


def test_a_large_picture_that_is_truncated_is_skipped(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (400, 400, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "sheet.png")
    complete = (tmp_path / "sheet.png").read_bytes()
    (tmp_path / "sheet.png").write_bytes(complete[: MAX_PICTURES_BYTES + 1_000])
    assert picture_metadata(tmp_path) == {}


def test_a_large_png_is_embedded_as_a_jpeg(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (300, 300, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "before_after.png")
    original_bytes = (tmp_path / "before_after.png").stat().st_size
    assert original_bytes > MAX_PICTURES_BYTES

    (value,) = picture_metadata(tmp_path).values()
    head, _, data = str(value.value).partition("base64,")
    assert head == "![`before_after`](data:image/jpeg;"
    assert embedded_size(value) <= MAX_PICTURE_BYTES
    with Image.open(io.BytesIO(base64.b64decode(data.rstrip(")")))) as picture:
        assert picture.format == "JPEG"
    assert (tmp_path / "before_after.png").stat().st_size == original_bytes


def test_pictures_have_captions_below_them_and_missing_or_large_ones_are_skipped(tmp_path: Path) -> None:
    pictures = {tmp_path / f"{name}.jpg": f"caption {name}" for name in "abcd"}
    for path, size in zip(pictures, (9, MAX_PICTURES_BYTES, 9), strict=False):
        path.write_bytes(b"x" * size)
    lines = str(captioned_pictures(pictures).value).split("\n\n")
    assert [line.split(";")[0] for line in lines] == [
        "![a](data:image/jpeg",
        "caption a",
        "![c](data:image/jpeg",
        "caption c",
    ]


def test_M7_pictures_are_stored_once_until_they_change_or_their_run_is_deleted(
    tmp_path: Path, tiny_sd: Path
) -> None:
    (tmp_path / "data").mkdir()
    for name in ("rose", "lily"):
        Image.radial_gradient("L").save(tmp_path / "data" / f"{name}.png")
        (tmp_path / "data" / f"{name}.txt").write_text(f"a {name}")
    recipe = small_recipe(tmp_path, model={"base": tiny_sd})
    graph = build_definitions([recipe]).get_repository_def().asset_graph
    keys = [AssetKey(["flowers", name]) for name in ("raw_images", "validated_dataset")]
    selection = AssetSelection.assets(*keys).without_checks()

    with DagsterInstance.ephemeral() as instance:

        def run() -> tuple[str, dict[str, Any]]:
            result = materialize([*graph.assets_defs], selection=selection, instance=instance)
            (event,) = result.asset_materializations_for_node("flowers__validated_dataset")
            shown = {name: value.value for name, value in event.metadata.items() if "picture" in name}
            return result.run_id, shown

        first, pictures = run()
        assert "picture_kept" in pictures
        for _ in range(2):
            _, again = run()
            version = pictures["pictures_version"]
            assert again == {"unchanged_pictures": first, "pictures_version": version}

        instance.delete_run(first)
        third, restored = run()
        assert restored == pictures
        Image.linear_gradient("L").save(tmp_path / "data" / "lily.png")
        _, changed = run()
        assert changed.keys() == pictures.keys()
        assert changed["pictures_version"] != pictures["pictures_version"]
        assert third != first
