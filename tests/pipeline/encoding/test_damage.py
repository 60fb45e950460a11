"""Damage every entry of a small cache in every way; the checks report it and the next run repairs it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.cache.entry_format import DATA_START
from pipeline.cache.requests import RecipeEntries
from tests.pipeline.cached_job import ASSETS, Job

_random = random.Random(4)


def emptied(path: Path, _: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path, _: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: _random.randrange(1, len(raw))])


def flipped_in_header(path: Path, _: Path) -> None:
    _flip(path, 0, DATA_START)


def flipped_in_data(path: Path, _: Path) -> None:
    _flip(path, DATA_START, path.stat().st_size)


def replaced(path: Path, neighbour: Path) -> None:
    path.write_bytes(neighbour.read_bytes())


def grown(path: Path, _: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0" * _random.randrange(1, 100))


def deleted(path: Path, _: Path) -> None:
    path.unlink()


def a_folder(path: Path, _: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("kept")


def _flip(path: Path, start: int, end: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[_random.randrange(start, end)] ^= 1 << _random.randrange(8)
    path.write_bytes(raw)


DAMAGES = [emptied, cut, flipped_in_header, flipped_in_data, replaced, grown, deleted, a_folder]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("asset", ASSETS)
def test_L02_L06_L07_damage_to_any_entry_is_reported_and_repaired(
    job: Job, asset: str, damage: Callable[[Path, Path], None]
) -> None:
    entries = RecipeEntries(job.recipe)
    sound = contents(job)
    for row in job.tables.read(asset).to_dicts():
        spec = entries.latent_spec(row) if asset == "vae_latents" else entries.text_spec(row["caption"])
        path = entries.store.path(spec)
        neighbour = next(other for other in sorted(path.parents[1].rglob("*.safetensors")) if other != path)
        damage(path, neighbour)

        reported_rows = [row for finding in job.failing(asset).values() for row in finding.rows]
        assert {reported["path"] for reported in reported_rows} == {str(path)}
        assert all(reported["problem"] for reported in reported_rows)
        others = {"vae_latents", "text_embeddings"} - {asset}
        assert all(job.failing(other) == {} for other in others), (
            "a check of the other stage reports the damage"
        )

        job.cache()
        assert job.failing(asset) == {}
        assert contents(job) == sound
        displaced = list(path.parent.glob("*.displaced"))
        assert bool(displaced) == (damage is a_folder)
        for folder in displaced:
            assert (folder / "inside").read_text() == "kept", (
                "the contents of the displaced folder were deleted"
            )
            shutil.rmtree(folder)


def contents(job: Any) -> dict[str, bytes]:
    root = job.recipe.cache_dir
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.safetensors")}
