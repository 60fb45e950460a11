"""Patterns of a recipe exclude files and folders of a dataset."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.raw_images.exclusion import excluded_by


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
