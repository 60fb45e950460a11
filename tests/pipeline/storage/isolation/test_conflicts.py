"""Conflicts of inputs with outputs, by `check_isolation` with its own limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.storage.isolation import NamedPath, check_isolation
from pipeline.storage.isolation.conflicts import MAX_LINKS_REPORTED


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
    assert len(conflicts(home)) == MAX_LINKS_REPORTED
