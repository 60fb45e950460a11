"""Two machines with the same folders share a cache in S3."""

from __future__ import annotations

import hashlib
import sys
import time
from typing import TYPE_CHECKING, Any

import fsspec

from tests.machines.ceph import Gateway
from tests.machines.machine import Machine
from tests.machines.project import ROOT

if TYPE_CHECKING:
    from tests.machines.pair import Pair

USE = """
import sys
from pipeline.cache.backends import cache_folder
from pipeline.cache.used_keys import KeyLists
from pipeline.storage.addresses import Url

cache, *keys = sys.argv[1:]
KeyLists(Url(cache), [keys], log=lambda line: print(line, file=sys.stderr)).mark()
names = [file.name.rpartition("/")[2] for file in cache_folder(Url(cache)).files()]
print(*sorted({name.removesuffix(".safetensors") for name in names} & set(keys)))
"""
"""What a job does to a cache before it encodes or trains: record its keys, then look for their entries."""

COLLECT = """
import sys
from pipeline.cache.used_keys import UsedKeys
from pipeline.maintenance.gc import delete, survey
from pipeline.storage.addresses import Url

cache, oldest_kept_s = Url(sys.argv[1]), float(sys.argv[2])
delete(cache, survey(cache, keep_s=UsedKeys(cache, 0).oldest_kept_s - oldest_kept_s))
"""
"""`latentline gc --delete`, with an age that begins at a time of the service."""

KEY_OF_A, KEY_OF_BOTH, KEY_OF_B, KEY_OF_NOBODY = (digit * 64 for digit in "1234")


def entry_path(cache: str, key: str) -> str:
    return f"{cache}/latents/{key[:2]}/{key}.safetensors"


def keys_in(cache: str) -> set[str]:
    names = fsspec.filesystem("s3", skip_instance_cache=True).find(f"{cache}/latents")
    return {name.rpartition("/")[2].removesuffix(".safetensors") for name in names}


def time_between(cache: str) -> float:
    """Return a time of the service that differs from all times before and after by at least a second."""
    files: Any = fsspec.filesystem("s3", skip_instance_cache=True)
    time.sleep(2.1)  # the service states times in seconds
    files.pipe_file(f"{cache}/clock", b"")
    time.sleep(1.1)
    files.invalidate_cache()
    return files.info(f"{cache}/clock")["LastModified"].timestamp()


def run(machine: Machine, gateway: Gateway, script: str, *arguments: str) -> list[str]:
    variables = {**gateway.environment(), "PYTHONPATH": str(ROOT)}
    completed = machine.run([sys.executable, "-c", script, *arguments], **variables)
    assert completed.returncode == 0, completed.stderr[-3000:]
    return completed.stdout.split()


def test_H01_gc_on_one_machine_keeps_the_entries_that_any_machine_uses(
    two_machines: list[Machine], gateway: Gateway, s3: str
) -> None:
    a, b = two_machines
    cache = f"{s3}/cache"
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    for key in (KEY_OF_A, KEY_OF_BOTH, KEY_OF_B, KEY_OF_NOBODY):
        files.pipe_file(entry_path(cache, key), b"an entry")
    run(a, gateway, USE, cache, KEY_OF_NOBODY, KEY_OF_A)
    last_month_s = time_between(cache)
    run(a, gateway, USE, cache, KEY_OF_A, KEY_OF_BOTH)
    run(b, gateway, USE, cache, KEY_OF_BOTH, KEY_OF_B)

    run(b, gateway, COLLECT, cache, str(last_month_s))
    assert keys_in(cache) == {KEY_OF_A, KEY_OF_BOTH, KEY_OF_B}


def test_H01_what_a_job_finds_while_another_machine_collects_is_never_deleted(
    two_machines: list[Machine], gateway: Gateway, s3: str
) -> None:
    """The gc of machine b is killed once, and started again."""
    a, b = two_machines
    cache = f"{s3}/cache"
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    keys = [hashlib.sha256(bytes([number])).hexdigest() for number in range(240)]
    for key in keys:
        files.pipe_file(entry_path(cache, key), b"an entry")
    run(a, gateway, USE, cache, KEY_OF_A)
    last_month_s = time_between(cache)

    variables = {**gateway.environment(), "PYTHONPATH": str(ROOT)}
    collect = [sys.executable, "-c", COLLECT, cache, str(last_month_s)]
    found: set[str] = set()
    for attempt in ("killed", "complete"):
        collector = b.start(collect, log=f"{attempt}.log", **variables)
        found |= set(run(a, gateway, USE, cache, *keys[:20]))
        if attempt == "killed":
            b.kill_all()
        collector.wait(300)
        found |= set(run(a, gateway, USE, cache, *keys[20:40]))
    assert found <= keys_in(cache) <= set(keys[:40])


def test_H01_gc_on_one_machine_keeps_the_entries_of_another_with_the_same_paths(
    pair: Pair, gateway: Gateway
) -> None:
    """Machine a has one photograph more than b, and the cache has one entry that nobody uses."""
    cache = pair.a.cache
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    files.pipe_file(entry_path(cache, KEY_OF_NOBODY), b"an entry")
    run(pair.a.machine, gateway, USE, cache, KEY_OF_NOBODY)
    last_month_s = time_between(cache)

    for name in ("photo0.png", "photo0.txt"):
        (pair.b.data / name).unlink()
    for project in (pair.a, pair.b):
        completed = project.latentline("run", "small", "--cache-only")
        assert completed.returncode == 0, completed.stderr[-3000:]
    assert pair.a.report("vae_latents")["encoded"] == 5
    assert (pair.b.report("vae_latents")["encoded"], pair.b.report("vae_latents")["reused"]) == (0, 4)

    used = {name for name in files.find(cache) if name.endswith(".safetensors")}
    used.remove(entry_path(cache, KEY_OF_NOBODY).removeprefix("s3://"))
    run(pair.b.machine, gateway, COLLECT, cache, str(last_month_s))
    remaining = {name for name in files.find(cache) if name.endswith(".safetensors")}
    assert remaining == used, "only the entry that nobody uses is deleted"
