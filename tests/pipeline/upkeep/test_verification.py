"""latentline verify: a disk that lies is found, named and mended."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.checks import vae_latents
from pipeline.checks.base import CheckContext
from pipeline.upkeep import verification
from pipeline.upkeep.verification import Bad, needed_entries, verify
from tests.pipeline.cached_job import Job


def passed_on(states: Iterator[Any]) -> Iterator[Any]:
    yield from states


def bad(job: Job) -> list[Bad]:
    return verify(job.recipe, needed_entries(job.recipe, job.tables), passed_on)


def rot(path: Path) -> None:
    """One bit of the data flips on the disk, and no stat says so."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-3, os.SEEK_END)
        file.write(bytes([byte ^ 4]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_sound_cache_has_nothing_bad_and_each_entry_is_looked_at_once(job: Job) -> None:
    needed = needed_entries(job.recipe, job.tables)
    assert (
        len(needed)
        == len({each.spec.key for each in needed})
        == len(list(job.recipe.cache_dir.rglob("*.safetensors")))
    )
    assert bad(job) == []


@pytest.mark.parametrize("asset", ["vae_latents", "text_embeddings"])
def test_L07_bit_rot_that_no_gate_can_see_is_found_and_named(
    job: Job, asset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = job.entry(asset)
    rot(path)
    trust_all(job, monkeypatch)
    assert job.failing(asset) == {}, "the file's stat is as recorded, and yet it was read"
    (found,) = bad(job)
    assert (found.path, found.needed.name, found.problem) == (
        path,
        "photos/cat.png",
        "its checksum does not hold",
    )


def trust_all(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real rot leaves the change time as it was as well, which no program can set."""
    from pipeline import store

    real = store._entry_stat
    ctimes = {
        row["entry_inode"]: row["entry_ctime_ns"]
        for asset in ("vae_latents", "text_embeddings")
        for row in job.tables.read(asset).to_dicts()
    }

    def as_recorded(found: os.stat_result) -> Any:
        stat = real(found)
        return store.EntryStat(
            stat.num_bytes, stat.mtime_ns, ctimes.get(stat.inode, stat.ctime_ns), stat.inode
        )

    monkeypatch.setattr(store, "_entry_stat", as_recorded)


def test_a_repair_makes_the_bad_entries_again_and_leaves_the_others(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = sorted(job.recipe.cache_dir.rglob("*.safetensors"))
    sound = {path: path.read_bytes() for path in entries}
    latent, text = job.entry("vae_latents"), job.entry("text_embeddings")
    rot(latent)
    text.unlink()
    others = {path: path.stat() for path in entries if path not in (latent, text)}
    trust_all(job, monkeypatch)
    found = bad(job)
    assert {each.path for each in found} == {latent, text}
    monkeypatch.setattr(verification, "LocalLaunch", lambda _: job.launch)
    said: list[str] = []
    verification.repair(job.recipe, job.tables, found, log=said.append)
    assert {path: path.read_bytes() for path in entries} == sound
    assert {path: path.stat() for path in others} == others
    monkeypatch.undo()
    assert bad(job) == []
    assert all(finding.passed for finding in vae_latents.run(CheckContext(job.recipe, job.tables)))
    assert said
