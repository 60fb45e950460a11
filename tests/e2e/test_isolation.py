"""L01: overlapping paths in any spelling write no file, and the error names both."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from dagster import AssetKey

Contents = dict[str, bytes]


def contents(folder: Path) -> Contents:
    return {os.path.relpath(path, folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def linked(root: Path) -> str:
    (root / "link").symlink_to(root / "data")
    return str(root / "link")


SPELLINGS: dict[str, Callable[[Path], str]] = {
    "a cache inside the dataset": lambda root: str(root / "data" / "cache"),
    "a dataset inside the cache": str,
    "the same folder": lambda root: str(root / "data"),
    "a trailing slash": lambda root: f"{root}/data/",
    "a path with dots": lambda root: f"{root}/out/../data",
    "a symlink": linked,
    "a folder inside a symlink": lambda root: f"{linked(root)}/cache",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_L01_a_cache_that_overlaps_the_dataset_closes_the_gate_before_any_write(fresh, spelling: str) -> None:
    cache_dir = SPELLINGS[spelling](fresh.root)
    fresh.recipe(cache_dir=cache_dir)
    before = contents(fresh.root)
    result = fresh.execute("train")
    assert not result.success
    assert contents(fresh.root) == before
    [evaluation] = result.get_asset_check_evaluations()
    assert (evaluation.check_name, evaluation.passed) == ("path_isolation", False)
    assert evaluation.asset_key == AssetKey(["small", "raw_images"])
    assert cache_dir.rstrip("/") in str(evaluation.description)
    assert str(fresh.data) in str(evaluation.description)
    assert [event.step_key for event in result.get_step_failure_events()] == ["small__raw_images"]
