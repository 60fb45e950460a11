"""Read a shuffled epoch of latents from an object store: from packs, and from single objects.

    python -m bench.packs_on_s3 --entries 20000 --edge 64

Starts Ceph's gateway (see tests/machines/ceph.py), writes the same latents to two caches, one with single
objects and one with packs, and reads each in the same random order as training does: `Store.read` in
`Store.readers` threads. Prints one line of JSON per measurement, with the time of the clock and the processor
time of this process per latent.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import fsspec
import numpy as np

from pipeline.cache.entry_format import EntrySpec, TensorSpec, serialise
from pipeline.cache.folder import entry_name
from pipeline.cache.pack_copies import CopySettings
from pipeline.cache.packs import build_pack
from pipeline.cache.sealing import MAX_ENTRIES
from pipeline.cache.store import Store
from pipeline.storage.addresses import Url
from tests.machines.ceph import Gateway

PART = 1000
"""Number of reads after which the time is printed."""


def main() -> None:
    """Write and read the latents."""
    parser = argparse.ArgumentParser(description="Read an epoch of latents from packs and single objects.")
    parser.add_argument("--entries", type=int, default=20_000)
    parser.add_argument("--edge", type=int, default=64, help="edge of a latent with 4 channels in float16")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="packs-") as temp:
        folder = Path(temp)
        (folder / "ceph").mkdir()
        gateway = Gateway(folder / "ceph", host="127.0.0.1")
        try:
            os.environ.update(gateway.environment())
            measure(folder, options.entries, options.edge)
        finally:
            gateway.close()


def measure(folder: Path, num_entries: int, edge: int) -> None:
    """Write both caches, and read them."""
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bench")
    tensors = {"latent": TensorSpec("float16", (4, edge, edge))}
    specs = [
        EntrySpec("latents", f"{random.Random(n).getrandbits(256):064x}", tensors) for n in range(num_entries)
    ]
    specs.sort(key=lambda spec: spec.key)
    report("size of an entry in bytes", value=specs[0].file_bytes)

    packed = Url("s3://bench/packed")
    with measured("write packs", num_entries):
        write_packs(Store(packed), specs)
    index = Store(packed).packs["latents"]
    with measured("list packs and read their headers", num_entries):
        index.refresh()
    with measured("list packs again", num_entries):
        index.refresh()
    single = Url("s3://bench/single")
    with measured("write single objects", num_entries):
        write_single(Store(single), specs)

    order = specs.copy()
    random.Random(0).shuffle(order)
    copies = CopySettings(folder / "copies", 20 * 10**9)
    epoch("packs without copies", Store(packed), order[: num_entries // 10])
    epoch("packs, first epoch", Store(packed, copies=copies), order)
    epoch("packs, copies complete", Store(packed, copies=copies), order)
    epoch("single objects", Store(single), order)


def epoch(name: str, store: Store, order: list[EntrySpec]) -> None:
    """Read the entries once with a new store."""
    start_s, start_cpu_s, num_read = time.perf_counter(), time.process_time(), 0
    with ThreadPoolExecutor(store.readers) as pool:
        for part in batches(order, PART):
            for arrays in pool.map(store.read, part):
                assert arrays["latent"].shape == order[0].tensors["latent"].shape
            num_read += len(part)
            report(
                name,
                reads=num_read,
                ms_per_latent=round((time.perf_counter() - start_s) / num_read * 1e3, 3),
                cpu_ms_per_latent=round((time.process_time() - start_cpu_s) / num_read * 1e3, 3),
            )


def write_packs(store: Store, specs: list[EntrySpec]) -> None:
    """Write the entries in packs only."""
    for part in batches(specs, MAX_ENTRIES):
        store.folder.replace(*build_pack("latents", {spec.key: entry(spec) for spec in part}))


def write_single(store: Store, specs: list[EntrySpec]) -> None:
    """Write the entries as single objects only."""
    with ThreadPoolExecutor(store.threads) as pool:
        list(pool.map(lambda spec: store.folder.replace(entry_name(spec.kind, spec.key), entry(spec)), specs))


def entry(spec: EntrySpec) -> bytes:
    """Return the bytes of an entry with random values."""
    values = np.random.default_rng(int(spec.key[:8], 16)).standard_normal(spec.tensors["latent"].shape)
    return serialise(spec, {"latent": values.astype("<f2")}, {"inputs": {"content_hash": spec.key}})


def batches(items: Iterable[EntrySpec], size: int) -> Iterator[list[EntrySpec]]:
    """Yield the items in lists of `size`, the last one shorter."""
    iterator = iter(items)
    while part := list(islice(iterator, size)):
        yield part


@contextmanager
def measured(name: str, num_entries: int) -> Generator[None]:
    """Print the time of the body per entry."""
    start_s = time.perf_counter()
    yield
    report(name, ms_per_entry=round((time.perf_counter() - start_s) / num_entries * 1e3, 3))


def report(name: str, **values: object) -> None:
    """Print one line of JSON."""
    print(json.dumps({"measured": name, **values}), flush=True)


if __name__ == "__main__":
    main()
