"""The walk of one dataset: exclusion, limits, and datasets that cannot be read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.errors import DatasetError
from pipeline.log import discard
from pipeline.raw_images.folder import sidecar_path
from pipeline.raw_images.walk import excluded_by, require_readable, walk_dataset, without_suffix
from pipeline.recipe import DatasetSettings, recipe_from_mapping


def settings_of(path: Path | str, **values: Any) -> DatasetSettings:
    recipe = recipe_from_mapping(
        "small",
        {
            "datasets": [{"name": "d", "path": str(path), **values}],
            "cache_dir": "/nowhere/cache",
            "output_dir": "/nowhere/out",
            "model": {"base": "no model"},
        },
    )
    return recipe.datasets[0]


def write_files(folder: Path, outside: Path) -> None:
    """Write one file of each kind: an image, captions, a foreign cache, a broken link and a link out."""
    folder.mkdir(parents=True)
    for name in ("a.png", "a.txt", "orphan.txt", "cache.npz"):
        (folder / name).write_bytes(b"x")
    (folder / "broken.png").symlink_to("gone.png")
    (folder / "out.png").symlink_to(outside)


def test_excluded_files_of_every_kind_are_removed_and_images_and_broken_links_are_counted(
    tmp_path: Path,
) -> None:
    root = tmp_path / "data"
    for number, name in enumerate(("", "masks", "masks/deep")):
        (tmp_path / f"{number}.png").write_bytes(b"x")
        write_files(root / name / "files", tmp_path / f"{number}.png")
    walked = walk_dataset(settings_of(root, exclude=["masks"]), log=discard)
    assert walked.images["sample_id"].to_list() == ["d/files/a.png", "d/files/out.png"]
    assert [row["sample_id"] for row in walked.rejected] == ["d/files/broken.png"]
    assert walked.orphan_captions == ["files/orphan.txt"]
    assert walked.walk.foreign_caches == ["files/cache.npz"]
    assert walked.walk.links_out == ["files/out.png"]
    assert sorted(walked.walk.captions) == ["files/a.txt", "files/orphan.txt"]
    assert walked.walk.passed_over["excluded"] == 2 * 3, "two images and a broken link in each of two folders"


def test_a_dataset_without_images_has_a_table_with_the_usual_columns(tmp_path: Path) -> None:
    filled, empty = tmp_path / "filled", tmp_path / "empty"
    filled.mkdir()
    empty.mkdir()
    (filled / "a.png").write_bytes(b"x")
    tables = [walk_dataset(settings_of(folder), log=discard).images for folder in (filled, empty)]
    assert [len(table) for table in tables] == [1, 0]
    assert tables[0].schema == tables[1].schema


def test_the_files_of_a_dataset_have_the_size_limit_of_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(bytes(11))
    for limit in (10, 11):
        source = walk_dataset(settings_of(tmp_path), log=discard, max_file_bytes=limit).source
        assert source.max_file_bytes == limit


def test_a_folder_or_manifest_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="cannot be read"):
        require_readable(settings_of(tmp_path / "gone"))
    require_readable(settings_of(tmp_path))
    require_readable(settings_of("s3://bucket/photos"))  # remote datasets are not checked

    listing = tmp_path / "list.csv"
    with pytest.raises(DatasetError):
        require_readable(settings_of(listing))
    listing.write_text("other\na.png\n")
    with pytest.raises(DatasetError, match="path"):
        require_readable(settings_of(listing))
    listing.write_text("path\na.png\n")
    require_readable(settings_of(listing), max_file_bytes=11)
    with pytest.raises(DatasetError, match="11"):
        require_readable(settings_of(listing), max_file_bytes=10)


def test_every_folder_of_a_dataset_must_be_readable_and_its_error_names_its_key(tmp_path: Path) -> None:
    for name in ("photos", "before"):
        (tmp_path / name).mkdir()
    listing = tmp_path / "list.csv"
    listing.write_text("path,mask\na.png,b.png\n")
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (tmp_path / "photos", {"mask": {"path": tmp_path / "maskz"}}, "mask.path"),
        (listing, {"images": tmp_path / "fotos"}, "images"),
        (listing, {"images": tmp_path / "fotos", "mask": {"column": "mask"}}, "images"),
        (
            tmp_path / "photos",
            {"references": [{"path": tmp_path / "before"}, {"path": tmp_path / "styles"}]},
            "references[1].path",
        ),
    ]
    for path, values, key in cases:
        with pytest.raises(DatasetError) as excinfo:
            require_readable(settings_of(path, **values))
        assert excinfo.value.what.startswith(f"the folder in datasets[].{key} cannot be read: ")
        assert f"datasets[].{key}" in excinfo.value.fix
        assert "datasets[].path" not in excinfo.value.fix

    # Masks at an address, and masks that are the images' opacity, have no local folder.
    for mask in ({"path": "s3://bucket/masks"}, {"from": "alpha"}):
        require_readable(settings_of(tmp_path / "photos", mask=mask))


@pytest.mark.parametrize(
    ("pattern", "path", "is_excluded"),
    [
        ("masks", "masks/a.png", True),
        ("masks", "old/masks/deep/a.png", True),
        ("masks", "masks.png", False),
        ("masks/", "old/masks/a.png", True),
        ("*-mask.png", "a-mask.png", True),
        ("*-mask.png", "old/a-mask.png", True),
        ("*-mask.png", "a-mask.png.jpg", False),
        ("?.png", "ab.png", False),
        ("/masks", "old/masks/a.png", False),
        ("old/masks", "old/masks/a.png", True),
        ("old/masks", "older/old/masks/a.png", False),
        ("*/*", "a.png", False),
        ("*/*", "sub/a.png", True),
        ("*/*", "sub/deep/a.png", True),
        ("MASKS", "masks/a.png", False),
        ("K\u00e4tzchen", "Ka\u0308tzchen/a.png", True),
        ("[a]", "[a]/b.png", True),
        ("[a]", "a/b.png", False),
        ("a.png", "axpng", False),
    ],
)
def test_a_pattern_matches_names_or_paths_from_the_folder(pattern: str, path: str, is_excluded: bool) -> None:
    assert excluded_by([pattern])(path) is is_excluded


def test_several_patterns_are_alternatives_and_none_excludes_nothing() -> None:
    is_excluded = excluded_by(["masks", "*.gif"])
    assert [is_excluded(path) for path in ("masks/a.png", "b.gif", "c.png")] == [True, True, False]
    assert not excluded_by([])("masks/a.png")


def test_excluded_files_are_neither_images_nor_rejected_and_are_counted(folder: Any) -> None:
    for path in ("a.png", "a-mask.png", "masks/a.png"):
        folder.add(path, folder.picture(1))
    folder.add("masks/broken.png", b"not an image")
    folder.dataset = {"exclude": ["masks", "*-mask.png"]}
    result = folder.scan()
    assert result.table["sample_id"].to_list() == ["d/a.png"]
    assert len(result.rejected) == 0
    assert result.report["passed_over"]["excluded"] == 3


def matches(pattern: str, path: str) -> bool:
    """Return whether a pattern matches a path completely, by trying everything."""
    if not pattern or not path:
        return pattern.strip("*") == path
    if pattern[0] == "*":
        return matches(pattern[1:], path) or (path[0] != "/" and matches(pattern, path[1:]))
    return (pattern[0] == path[0] or (pattern[0] == "?" and path[0] != "/")) and matches(
        pattern[1:], path[1:]
    )


@given(st.text("ab*?", min_size=1, max_size=8), st.lists(st.text("ab", min_size=1), min_size=1, max_size=3))
@example("*a*b*", ["ab"])
@example("*?a", ["aa", "b"])
def test_a_pattern_matches_as_if_every_place_of_its_stars_were_tried(pattern: str, parts: list[str]) -> None:
    assert excluded_by([pattern])("/".join(parts)) is any(matches(pattern, part) for part in parts)


@pytest.mark.timeout(20)
def test_a_pattern_of_many_stars_takes_no_longer_than_one() -> None:
    is_excluded = excluded_by(["*a" * 60 + "b", "/".join(["*a*a*a*a*a*c"] * 3), "?*" * 40 + "b"])
    for path in ("a" * 250, "/".join(["a" * 250] * 10)):
        assert not is_excluded(path)


@given(st.lists(st.text(alphabet="a./ \n\u00e4\U0001f98a", min_size=1)))
@example(
    ["a.b.png", ".txt", "sub/.txt", "..txt", "a..png", "a.", "a.b/c", "a.\nb", "a\n.b\n", "\u00e4.\u00e4"]
)
def test_a_column_of_paths_loses_the_same_suffixes_as_single_paths(paths: list[str]) -> None:
    table = pl.DataFrame({"path": paths}, schema={"path": pl.String})
    stems = table.select(without_suffix(pl.col("path"))).to_series().to_list()
    assert stems == [sidecar_path(path, "") for path in paths]


def test_captions_of_rejected_and_of_undecodable_names_are_not_orphans(tmp_path: Path) -> None:
    for name in (b"a.png", b"a.txt", b"\xff.png", b"\xff.txt", b"\xfe.txt", b"orphan.b.txt"):
        (tmp_path / os.fsdecode(name)).write_bytes(b"x")
    (tmp_path / "broken.png").symlink_to("gone.png")
    (tmp_path / "broken.txt").write_bytes(b"x")
    walked = walk_dataset(settings_of(tmp_path), log=discard)
    assert sorted(walked.orphan_captions) == sorted(["orphan.b.txt", os.fsdecode(b"\xfe.txt")])


_LIST = """
import resource, sys
from pathlib import Path
from pipeline.log import discard
from pipeline.raw_images.walk import walk_dataset
from tests.pipeline.raw_images.test_walk import settings_of

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
walked = walk_dataset(settings_of(Path(sys.argv[1])), log=discard)
print(len(walked.images), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_300_000_images_in_one_folder_are_listed_with_less_than_2_kb_each(tmp_path: Path) -> None:
    number = 300_000
    (tmp_path / "data").mkdir()
    for index in range(number):
        (tmp_path / "data" / f"{index}.png").touch()
    command = [sys.executable, "-c", _LIST, str(tmp_path / "data")]
    listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()
    assert int(listed[0]) == number
    assert int(listed[1]) * 1024 < 2_000 * number
