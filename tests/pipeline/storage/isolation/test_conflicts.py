"""Conflicts of inputs with outputs, by `check_isolation` with its own limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import PathIsolationError
from pipeline.storage.isolation import NamedPath, check_isolation
from pipeline.storage.isolation.conflicts import (
    MAX_LINKS_REPORTED,
    PathConflict,
    Relation,
    ResolvedPath,
    compare_paths,
    raise_conflicts,
)
from pipeline.storage.isolation.identity import identify
from pipeline.storage.isolation.links import LinkInto


def conflicts(home: Path) -> list[str]:
    """Return one sentence per conflict of data with cache and out."""
    outputs = [NamedPath(name, name, home / name) for name in ("cache", "out")]
    found = check_isolation([NamedPath("data", "data", home / "data")], outputs)
    return [each.what() for each in found]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for name in ("data/sub", "cache", "out"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("output", ["cache", "out"])
@pytest.mark.parametrize("target", ["data", "data/sub"])
@pytest.mark.parametrize("level", ["latents", "latents/ab"])
def test_L01_a_link_in_the_first_two_levels_of_an_output_into_a_dataset_is_found(
    home: Path, output: str, level: str, target: str
) -> None:
    """Entries are written to <cache>/latents/ab, so a link there would lead into the data."""
    link = home / output / level
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(home / target)
    assert conflicts(home) == [f"a link in {output} leads into data"], (
        f"{output}/{level} is a link to {target}"
    )


@pytest.mark.parametrize("output", ["cache", "out"])
@pytest.mark.parametrize("level", ["a", "a/b/c/d"])
def test_I19_a_link_at_any_level_of_a_dataset_into_an_output_is_found(
    home: Path, output: str, level: str
) -> None:
    link = home / "data" / level
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(home / output)
    assert conflicts(home) == [f"a link in data leads into {output}"], f"data/{level} is a link to {output}"


def test_the_number_of_reported_links_is_limited(home: Path) -> None:
    for number in range(MAX_LINKS_REPORTED + 1):
        (home / "data" / f"link{number}").symlink_to(home / "cache")
    assert len(conflicts(home)) == 10


def test_an_output_is_searched_for_links_in_its_first_two_levels_only(home: Path) -> None:
    """A cache may have millions of folders, and no file is written to a deeper one."""
    (home / "cache" / "latents" / "ab").mkdir(parents=True)
    (home / "cache" / "latents" / "ab" / "deeper").symlink_to(home / "data")
    assert conflicts(home) == []


@pytest.mark.parametrize(
    ("relation", "what", "fix"),
    [
        (
            "same",
            "cache and data are the same folder",
            "set cache.key to a folder that neither contains data",
        ),
        ("inside", "cache is inside data", "set cache.key to a folder that neither contains data"),
        ("contains", "cache contains data", "set cache.key to a folder that neither contains data"),
        ("link", "a link in cache leads into data", "remove the link, or move data to a folder that no link"),
    ],
)
def test_a_conflict_is_described_with_both_folders_and_a_fix(
    tmp_path: Path, relation: Relation, what: str, fix: str
) -> None:
    (tmp_path / "link").symlink_to("real")
    first = ResolvedPath("cache", "cache.key", tmp_path / "link", identify(tmp_path / "link"))
    second = ResolvedPath("data", "data.key", tmp_path / "data", identify(tmp_path / "data"))
    link = LinkInto("/a/link", "/b/target", "data") if relation == "link" else None
    conflict = PathConflict(first, second, relation, link)
    assert conflict.what() == what
    assert conflict.fix().startswith(fix)
    lines = [f"cache.key: {tmp_path}/link (real path {tmp_path}/real)", f"data.key: {tmp_path}/data"]
    assert conflict.where().splitlines() == [
        *lines,
        *(["link: /a/link (real path /b/target)"] if link else []),
    ]
    assert PathConflict(first, second, relation, link, advice="do this").fix() == "do this"


def test_no_conflicts_raise_no_error_and_repeated_lines_are_shown_once(tmp_path: Path) -> None:
    raise_conflicts([], where="recipe.yaml")
    paths = {name: NamedPath(name, name, tmp_path / name) for name in ("data", "data/sub")}
    conflict = compare_paths(paths["data/sub"], paths["data"])
    assert conflict is not None
    assert conflict.relation == "inside"
    with pytest.raises(PathIsolationError) as excinfo:
        raise_conflicts([conflict, conflict], where="recipe.yaml")
    assert excinfo.value.what == "data/sub is inside data"
    assert excinfo.value.where.splitlines() == [
        "recipe.yaml",
        f"data/sub: {tmp_path}/data/sub",
        f"data: {tmp_path}/data",
    ]
    assert compare_paths(paths["data"], NamedPath("other", "other", tmp_path / "other")) is None
