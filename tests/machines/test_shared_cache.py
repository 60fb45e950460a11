"""Two machines with the same folders share a cache in S3."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import fsspec
import pytest

from tests.machines.ceph import Gateway
from tests.machines.machine import Machine
from tests.machines.project import ROOT, latentline

if TYPE_CHECKING:
    from tests.machines.pair import Pair

USE_CACHE = """
import sys
from pathlib import Path

import numpy as np

from pipeline.cache.store import Store
from pipeline.cache.store import EntrySpec, TensorSpec
from pipeline.cache.users import register_user
from pipeline.storage.addresses import Url

cache, *keys = sys.argv[1:]
output_dir = Path("out").absolute()
output_dir.mkdir()
register_user(Url(cache), output_dir, recipe="small", kind="latents", keys=keys)
for key in keys:
    spec = EntrySpec("latents", key, {"latent": TensorSpec("float16", (4, 8, 6))})
    Store(Url(cache)).write(spec, {"latent": np.zeros((4, 8, 6), "<f2")}, {})
"""
"""What a cache job does to a cache, without a model: register the keys of ./out and write their entries."""

TRAIN = """
import sys
from pathlib import Path

from pipeline.cache.users import register_run, register_user
from pipeline.storage.addresses import Url

cache, key_of_run, key_of_job = sys.argv[1:]
output_dir = Path("out").absolute()
register_run(Url(cache), output_dir, recipe="small", run="1" * 16, keys=[key_of_run])
register_user(Url(cache), output_dir, recipe="small", kind="latents", keys=[key_of_job])
"""
"""What a training does to a cache, and then a cache job of the edited recipe: both register their keys."""

KEY_OF_A, KEY_OF_BOTH, KEY_OF_B, ORPHAN = (digit * 64 for digit in "1234")


def test_H01_gc_keeps_the_entries_that_another_machine_registered_for_the_same_path(
    two_machines: list[Machine], gateway: Gateway, s3: str
) -> None:
    a, b = two_machines
    cache = f"{s3}/cache"
    for machine, keys in ((a, [KEY_OF_A, KEY_OF_BOTH]), (b, [KEY_OF_BOTH, KEY_OF_B])):
        variables = {**gateway.environment(), "PYTHONPATH": str(ROOT)}
        used = machine.run([sys.executable, "-c", USE_CACHE, cache, *keys], **variables)
        assert used.returncode == 0, used.stderr[-3000:]
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    files.pipe_file(f"{cache}/latents/{ORPHAN[:2]}/{ORPHAN}.safetensors", b"needed by nobody")

    b.path("configs").mkdir()
    variables["LATENTLINE_CONFIGS"] = str(b.disk / "configs")
    gc = latentline("gc", "--delete", "--grace-hours", "0", "--cache-dir", cache)
    collected = b.run(gc, **variables)
    assert collected.returncode == 0, collected.stderr
    remaining = {
        name.rpartition("/")[2].removesuffix(".safetensors") for name in files.find(f"{cache}/latents")
    }
    assert remaining == {KEY_OF_A, KEY_OF_BOTH, KEY_OF_B}


def test_H01_gc_keeps_the_entries_of_a_training_on_another_machine_whose_recipe_was_edited(
    two_machines: list[Machine], gateway: Gateway, s3: str
) -> None:
    """Machine a trains with one entry. The cache job of the edited recipe needs another one."""
    a, b = two_machines
    cache = f"{s3}/cache"
    variables = {**gateway.environment(), "PYTHONPATH": str(ROOT)}
    for script, arguments in ((USE_CACHE, [KEY_OF_A, KEY_OF_BOTH]), (TRAIN, [KEY_OF_A, KEY_OF_BOTH])):
        used = a.run([sys.executable, "-c", script, cache, *arguments], **variables)
        assert used.returncode == 0, used.stderr[-3000:]
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    files.pipe_file(f"{cache}/latents/{ORPHAN[:2]}/{ORPHAN}.safetensors", b"needed by nobody")

    b.path("configs").mkdir()
    variables["LATENTLINE_CONFIGS"] = str(b.disk / "configs")
    gc = latentline("gc", "--delete", "--grace-hours", "0", "--cache-dir", cache)
    collected = b.run(gc, **variables)
    assert collected.returncode == 0, collected.stderr
    assert f"read by run {'1' * 16} of small, unfinished: entries kept" in collected.stdout
    remaining = {
        name.rpartition("/")[2].removesuffix(".safetensors") for name in files.find(f"{cache}/latents")
    }
    assert remaining == {KEY_OF_A, KEY_OF_BOTH}


@pytest.mark.slow
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
