"""After a cache job has failed, the entries of the table that it did not replace stay registered."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.cache.users import read_users
from pipeline.errors import LaunchError
from pipeline.vae_latents.stage import cache_latents
from tests.pipeline.cached_job import Job


def registered(job: Job) -> dict[str, frozenset[str]]:
    (user,) = read_users(job.recipe.cache_dir)
    return dict(user.job_keys)


def fail(*_arguments: Any) -> None:
    raise LaunchError("no worker", where="a test", fix="none")


def test_L13_entries_of_the_table_stay_registered_until_a_job_replaces_it(job: Job) -> None:
    before = registered(job)
    assert before.keys() == {"latents", "text"}
    buckets = job.tables.read("aspect_buckets")
    changed = job.changed(latents={"posterior": "mean"})
    with pytest.raises(LaunchError):
        cache_latents(changed, buckets, job.tables, launch=fail, log=lambda _: None)
    after = registered(job)
    assert after["latents"].isdisjoint(before["latents"])
    assert after["latents-earlier"] == before["latents"] == set(job.tables.read("vae_latents")["key"])

    cache_latents(changed, buckets, job.tables, launch=job.launch, log=lambda _: None)
    assert registered(job) == {"latents": after["latents"], "text": before["text"]}


def test_an_unchanged_job_registers_no_earlier_entries(job: Job) -> None:
    outputs = job.recipe.cache_dir / "outputs"
    before = {path.name: path.stat().st_ino for path in outputs.iterdir()}
    job.cache()
    assert {path.name: path.stat().st_ino for path in outputs.iterdir()} == before
