"""Silent corruption on disk is found, reported and repaired."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pipeline.cache.folder import entry_name
from pipeline.cache.packs import read_members
from pipeline.cache.recipe_entries import STAT_COLUMNS
from pipeline.cache.sealing import seal
from pipeline.cache.store import Store
from pipeline.maintenance import verify as verification
from pipeline.maintenance.forecast import forecast
from pipeline.maintenance.verify import BadEntry, needed_entries, verify
from pipeline.reporting.findings import CheckContext
from pipeline.vae_latents import checks as vae_latents
from pipeline.vae_latents.stage import cache_latents
from tests.pipeline.cached_job import ASSETS, Job
from tests.pipeline.packs_case import flip_bit, pack_everything, pack_names


def bad_entries_of(job: Job) -> list[BadEntry]:
    return verify(job.recipe, needed_entries(job.recipe, job.tables), log=print)


def rot(job: Job, path: Path) -> None:
    """Flip one bit of the file's data and record the new stat in the tables.

    A change time cannot be set, so the table is changed instead of the file's stat.
    """
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 4
    path.write_bytes(raw)
    for asset in ASSETS:
        table = job.tables.read(asset)
        concerned = pl.col("key") == path.stem
        (values,) = Store(job.recipe.cache_dir).stats(path.parents[1].name, [path.stem]).tolist()
        stat = dict(zip(STAT_COLUMNS, values, strict=True))
        changed = [pl.when(concerned).then(value).otherwise(name).alias(name) for name, value in stat.items()]
        job.tables.write(asset, table.with_columns(changed))


def test_a_valid_cache_has_no_bad_entries_and_each_key_is_needed_once(job: Job) -> None:
    needed = needed_entries(job.recipe, job.tables)
    assert (
        len(needed)
        == len({each.spec.key for each in needed})
        == len(list(job.recipe.cache_dir.rglob("*.safetensors")))
    )
    assert bad_entries_of(job) == []


@pytest.mark.parametrize("asset", ASSETS)
def test_L07_bit_rot_that_no_gate_can_detect_is_found(job: Job, asset: str) -> None:
    path = job.entry(asset)
    rot(job, path)
    assert job.failing(asset) == {}, "the stat is as recorded, so no gate reads the file"
    (bad_entries,) = bad_entries_of(job)
    assert (bad_entries.path, bad_entries.needed.name, bad_entries.problem) == (
        str(path),
        "photos/cat.png",
        "the checksum does not match the content",
    )


def test_a_repair_encodes_the_bad_entries_and_keeps_the_others(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = sorted(job.recipe.cache_dir.rglob("*.safetensors"))
    sound = {path: path.read_bytes() for path in entries}
    latent, text = job.entry("vae_latents"), job.entry("text_embeddings")
    rot(job, latent)
    text.unlink()
    others = {path: path.stat() for path in entries if path not in (latent, text)}
    bad_entries = bad_entries_of(job)
    assert {each.path for each in bad_entries} == {str(latent), str(text)}
    monkeypatch.setattr(verification, "LocalLaunch", lambda _: job.launch)
    log: list[str] = []
    verification.repair(job.recipe, job.tables, bad_entries, log=log.append)
    assert {path: path.read_bytes() for path in entries} == sound
    assert {path: path.stat() for path in others} == others
    assert bad_entries_of(job) == []
    findings = vae_latents.run(CheckContext(job.recipe, job.tables))
    assert {finding.name: finding.summary for finding in findings if not finding.passed} == {}
    assert log


def seal_all(job: Job) -> None:
    """Copy all entries into packs; the single files stay."""
    needed = needed_entries(job.recipe, job.tables)
    sealed = seal(Store(job.recipe.cache_dir), (each.spec for each in needed), log=print)
    assert sealed.num_entries == len(needed)


def test_a_repair_uses_the_valid_copy_in_a_pack_of_a_damaged_file(
    job: Job, forbidden_launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal_all(job)
    path = job.entry("vae_latents")
    rot(job, path)
    monkeypatch.setattr(verification, "LocalLaunch", lambda _: forbidden_launch)
    verification.repair(job.recipe, job.tables, bad_entries_of(job), log=print)
    assert not path.exists()
    assert bad_entries_of(job) == []
    assert job.failing("vae_latents") == {}


def test_a_repair_encodes_an_entry_that_is_damaged_in_its_file_and_in_a_pack(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal_all(job)
    path = job.entry("vae_latents")
    sound = path.read_bytes()
    rot(job, path)
    folder = Store(job.recipe.cache_dir).folder
    (pack,) = pack_names(folder)
    flip_bit(folder, pack, folder.read(pack).index(sound) + len(sound) - 3)
    monkeypatch.setattr(verification, "LocalLaunch", lambda _: job.launch)
    verification.repair(job.recipe, job.tables, bad_entries_of(job), log=print)
    assert path.read_bytes() == sound
    assert bad_entries_of(job) == []
    path.unlink()
    assert [each.problem for each in bad_entries_of(job)] == ["the checksum does not match the content"]


def test_a_repair_replaces_a_damaged_entry_that_is_only_in_a_pack_by_a_single_file(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_everything(job.recipe.cache_dir)
    job.cache()
    path = job.recipe.cache_dir / entry_name("latents", job.tables.read("vae_latents")["key"][0])
    folder = Store(job.recipe.cache_dir).folder
    (pack,) = pack_names(folder)
    members = read_members(folder, pack, len(folder.read(pack)))
    at = members.keys.index(path.stem)
    flip_bit(folder, pack, int(members.offsets[at] + members.lengths[at]) - 3)
    before = folder.read(pack)

    (bad,) = bad_entries_of(job)
    assert pack in bad.path
    monkeypatch.setattr(verification, "LocalLaunch", lambda _: job.launch)
    verification.repair(job.recipe, job.tables, [bad], log=print)
    assert bad_entries_of(job) == []
    assert job.failing("vae_latents") == {}
    assert [file.name for file in job.recipe.cache_dir.rglob("*.safetensors")] == [path.name]
    assert folder.read(pack) == before


def test_verification_reports_its_progress(job: Job, progress_lines: list[str]) -> None:
    needed = needed_entries(job.recipe, job.tables)
    verify(job.recipe, needed, log=progress_lines.append)
    assert progress_lines[-1].startswith(f"cache entries verified: {len(needed)} of {len(needed)}, ")


def test_jobs_and_plans_report_how_many_entries_they_read(job: Job, progress_lines: list[str]) -> None:
    """A cache that was copied has new stats, so all entries are read and none is encoded."""
    for path in job.recipe.cache_dir.rglob("*.safetensors"):
        os.utime(path)
    forecast(job.recipe, job.tables, log=progress_lines.append)
    assert "cache entries checked: 5 of 5, " in "\n".join(progress_lines)

    progress_lines.clear()
    buckets = job.tables.read("aspect_buckets")
    cache_latents(job.recipe, buckets, job.tables, launch=job.launch, log=progress_lines.append)
    assert "cache entries checked: 5 of 5, " in "\n".join(progress_lines)
