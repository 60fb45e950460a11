"""latentline verify: a disk that lies is found, named and mended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pipeline.cache.requests import stat_columns
from pipeline.cache.store import EntryStat, Store
from pipeline.checks.findings import CheckContext
from pipeline.maintenance import verify as verification
from pipeline.maintenance.verify import Bad, needed_entries, verify
from pipeline.vae_latents import checks as vae_latents
from tests.pipeline.cached_job import ASSETS, Job


def passed_on(states: Iterator[Any]) -> Iterator[Any]:
    yield from states


def bad(job: Job) -> list[Bad]:
    return verify(job.recipe, needed_entries(job.recipe, job.tables), passed_on)


def rot(job: Job, path: Path) -> None:
    """One bit of the data flips on the disk, and the file's stat is the recorded one.

    No program can set a change time; so the table is told the new one, as if it had always been that.
    """
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 4
    path.write_bytes(raw)
    for asset in ASSETS:
        table = job.tables.read(asset)
        concerned = pl.col("key") == path.stem
        stat = stat_columns(
            EntryStat(*Store(job.recipe.cache_dir).stats(path.parents[1].name, [path.stem])[0].tolist())
        )
        changed = [pl.when(concerned).then(value).otherwise(name).alias(name) for name, value in stat.items()]
        job.tables.write(asset, table.with_columns(changed))


def test_a_sound_cache_has_nothing_bad_and_each_entry_is_looked_at_once(job: Job) -> None:
    needed = needed_entries(job.recipe, job.tables)
    assert (
        len(needed)
        == len({each.spec.key for each in needed})
        == len(list(job.recipe.cache_dir.rglob("*.safetensors")))
    )
    assert bad(job) == []


@pytest.mark.parametrize("asset", ASSETS)
def test_L07_bit_rot_that_no_gate_can_see_is_found_and_named(job: Job, asset: str) -> None:
    path = job.entry(asset)
    rot(job, path)
    assert job.failing(asset) == {}, "the file's stat is as recorded, and yet it was read"
    (found,) = bad(job)
    assert (found.path, found.needed.name, found.problem) == (
        str(path),
        "photos/cat.png",
        "its checksum does not match",
    )


def test_a_repair_makes_the_bad_entries_again_and_leaves_the_others(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = sorted(job.recipe.cache_dir.rglob("*.safetensors"))
    sound = {path: path.read_bytes() for path in entries}
    latent, text = job.entry("vae_latents"), job.entry("text_embeddings")
    rot(job, latent)
    text.unlink()
    others = {path: path.stat() for path in entries if path not in (latent, text)}
    found = bad(job)
    assert {each.path for each in found} == {str(latent), str(text)}
    monkeypatch.setattr(verification, "LocalLaunch", lambda _: job.launch)
    said: list[str] = []
    verification.repair(job.recipe, job.tables, found, log=said.append)
    assert {path: path.read_bytes() for path in entries} == sound
    assert {path: path.stat() for path in others} == others
    assert bad(job) == []
    assert all(finding.passed for finding in vae_latents.run(CheckContext(job.recipe, job.tables)))
    assert said
