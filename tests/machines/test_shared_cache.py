"""Two machines with the same folders share a cache in S3."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fsspec

if TYPE_CHECKING:
    from tests.machines.conftest import Pair


def test_H01_gc_on_one_machine_keeps_the_entries_of_another_with_the_same_paths(pair: Pair) -> None:
    """Machine a has one photograph more than b, and the cache has one entry that nobody needs."""
    for name in ("photo0.png", "photo0.txt"):
        (pair.b.data / name).unlink()
    for project in (pair.a, pair.b):
        completed = project.latentline("run", "small", "--cache-only")
        assert completed.returncode == 0, completed.stderr[-3000:]
    assert pair.a.report("vae_latents")["encoded"] == 5
    assert (pair.b.report("vae_latents")["encoded"], pair.b.report("vae_latents")["reused"]) == (0, 4)

    files = fsspec.filesystem("s3", skip_instance_cache=True)
    needed = {name for name in files.find(pair.a.cache) if name.endswith(".safetensors")}
    orphan = f"{pair.a.cache}/latents/00/{'0' * 64}.safetensors"
    files.pipe_file(orphan, files.cat_file(min(needed)))

    collected = pair.b.latentline("gc", "--delete", "--grace-hours", "0")
    assert collected.returncode == 0, collected.stderr
    remaining = {name for name in files.find(pair.a.cache) if name.endswith(".safetensors")}
    assert remaining == needed, "only the orphan is deleted"
