"""Four workers on two machines encode the images of one step; one worker is killed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import numpy as np
from PIL import Image

from pipeline.encoding.jobs import read_encoding, share
from pipeline.encoding.shared_encoding import SharedEncoding
from pipeline.storage.addresses import Url
from tests.machines.children import Child, until
from tests.machines.counting_proxy import Request
from tests.machines.outputs import names_at
from tests.machines.project import Project, latentline, step_of

if TYPE_CHECKING:
    from tests.machines.pair import Pair

NUM_SHARDS = 4
NUM_IMAGES = 21
SUFFIX = ".safetensors"

SBATCH = """#!/bin/sh
# Instead of Slurm: wait until all tasks are complete. The test starts them.
echo "Submitted batch job 1"
while [ ! -e {disk}/complete ]; do sleep 0.2; done
"""

ENCODING = [*step_of("vae_latents")[:-1], '+key:"small/vae_latents"']
"""Command of all steps up to the latents."""


class KillAtSecondEntry:
    """Kills a worker while it writes the second entry of its shard, which is lost."""

    def __init__(self, keys: set[str]) -> None:
        self.worker: Child | None = None
        self.is_over = threading.Event()
        self._keys = keys
        self._num_entries = 0
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> None:
        with self._lock:
            if key_written_by(request) not in self._keys or self.is_over.is_set():
                return
            self._num_entries += 1
            if self._num_entries == 2:
                assert self.worker is not None
                self.worker.kill_tree()
                self.is_over.set()
                raise ConnectionResetError("the worker has died")


def key_written_by(request: Request) -> str | None:
    """Return the key of the entry that a request writes to the common cache."""
    is_entry = request.method == "PUT" and request.name.startswith("cache/latents/")
    return Path(request.name).name.removesuffix(SUFFIX) if is_entry else None


def entries_at(cache: str) -> dict[str, bytes]:
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    return {name: files.cat_file(f"{cache}/{name}") for name in names_at(cache) if name.endswith(SUFFIX)}


def keys_at(cache: str) -> set[str]:
    return {Path(name).name.removesuffix(SUFFIX) for name in names_at(cache) if name.endswith(SUFFIX)}


def prepare(project: Project) -> None:
    """Give each shard several images, and let the step submit its workers to the test."""
    for number in range(NUM_IMAGES - 5):
        pixels = np.random.default_rng(100 + number).integers(0, 256, (96, 96, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(project.data / f"more{number}.png")
        (project.data / f"more{number}.txt").write_text(f"noise {number}\n", encoding="utf-8")
    sbatch = project.machine.path("bin/sbatch")
    sbatch.parent.mkdir()
    sbatch.write_text(SBATCH.format(disk=project.machine.disk), encoding="utf-8")
    sbatch.chmod(0o755)


def start_worker(project: Project, encoding: str, number: int, log: str) -> Child:
    return project.start(latentline("encode", encoding, "--shard", f"{number}/{NUM_SHARDS}"), log=log)


def test_a_killed_worker_of_four_on_two_machines_leaves_only_its_rest_to_a_restart(
    pair: Pair, s3: str, tmp_path: Path
) -> None:
    for project in (pair.a, pair.b):
        prepare(project)

    # One process on machine b encodes the same images into another cache.
    pair.b.write_recipe(cache_dir=f"{s3}/alone")
    pair.b.deploy(pools="machine")
    alone = pair.b.start(ENCODING, log="alone.log")

    pair.a.deploy(pools="machine", launcher={"kind": "slurm", "workers": NUM_SHARDS})
    variables = pair.a.variables()
    path = f"{pair.a.machine.disk / 'bin'}:{pair.a.machine.run(['printenv', 'PATH']).stdout.strip()}"
    step = pair.a.machine.start(ENCODING, log="step.log", **{**variables, "PATH": path})

    def encodings() -> list[str]:
        return [name for name in names_at(f"{pair.a.cache}/encodings") if name.endswith("/encoding.json")]

    until(encodings, "the encoding", seconds=600, child=step)
    encoding = f"{pair.a.cache}/encodings/{encodings()[0].removesuffix('/encoding.json')}"
    file, _ = SharedEncoding(Url(encoding)).fetch(tmp_path)
    last = NUM_SHARDS - 1
    keys = {job.spec.key for job in share(read_encoding(file).jobs, last, NUM_SHARDS)}
    assert len(keys) >= 4

    pair.proxy.before = kill = KillAtSecondEntry(keys)
    kill.worker = start_worker(pair.b, encoding, last, "killed.log")
    others = [
        start_worker((pair.a, pair.b)[number % 2], encoding, number, f"worker-{number}.log")
        for number in range(last)
    ]
    for worker in others:
        assert worker.wait(600) == 0, worker.output()[-3000:]
    until(kill.is_over.is_set, "the second entry", seconds=60)
    existing = keys_at(f"{pair.a.cache}/latents")
    # A worker writes several entries at a time. The second one is lost, and others may be on their way.
    missing = keys - existing
    assert 0 < len(missing) < len(keys)
    assert not step.has_ended

    pair.proxy.requests.clear()
    restarted = start_worker(pair.a, encoding, last, "restarted.log")
    assert restarted.wait(600) == 0, restarted.output()[-3000:]
    written = [key for request in pair.proxy.requests if (key := key_written_by(request))]
    assert sorted(written) == sorted(missing), "each missing entry once, and no other"

    pair.a.machine.path("complete").touch()
    assert step.wait(600) == 0, step.output()[-3000:]
    report = pair.a.report("vae_latents")
    assert (report["samples"], report["failed"]) == (NUM_IMAGES, 0)
    # The killed worker has reported none of its entries, so that they count as reused.
    assert report["encoded"] + report["reused"] == NUM_IMAGES
    assert alone.wait(600) == 0, alone.output()[-3000:]
    entries, expected = entries_at(f"{pair.a.cache}/latents"), entries_at(f"{s3}/alone/latents")
    assert len(entries) == NUM_IMAGES
    assert [name for name in expected if entries.get(name) != expected[name]] == []
    assert names_at(f"{pair.a.cache}/encodings") == []
