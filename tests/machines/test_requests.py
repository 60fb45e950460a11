"""Requests to Ceph's S3 gateway: conditional puts, and what a large cache costs."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pytest
from PIL import Image

from pipeline.cache.entry_format import EntrySpec, TensorSpec
from pipeline.cache.remote_store import FsspecStore
from pipeline.recipe import load_recipe
from pipeline.storage.addresses import Url
from pipeline.storage.remote_folder import RemoteFolder
from tests.e2e.conftest import Workspace
from tests.machines.ceph import Gateway
from tests.machines.counting_proxy import CountingProxy
from tests.machines.filling import fill
from tests.machines.project import ROOT


def test_the_first_of_two_writers_wins_and_the_second_is_refused(s3: str) -> None:
    folder = RemoteFolder(Url(f"{s3}/cache"))
    assert folder.put_if_absent("a/b", b"first") is True
    assert folder.put_if_absent("a/b", b"second") is False
    assert folder.read("a/b") == b"first"


def test_of_many_concurrent_writers_exactly_one_creates_the_file(s3: str) -> None:
    folder = RemoteFolder(Url(f"{s3}/cache"))
    answers: list[bool | None] = []
    start = threading.Barrier(8)

    def write(number: int) -> None:
        start.wait(60)
        answers.append(folder.put_if_absent("entry", b"%d" % number))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, answers)) == ["False"] * 7 + ["True"]


def test_a_valid_entry_that_exists_costs_no_second_put(
    s3: str, proxy: CountingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
    store = FsspecStore(Url(f"{s3}/cache"))
    spec = EntrySpec("latents", "ab" * 32, {"latent": TensorSpec("float16", (4, 8, 6))})
    values = {"latent": np.zeros((4, 8, 6), "<f2")}
    assert store.write(spec, values, {})
    assert not store.write(spec, values, {})
    assert proxy.counts()["PUT"] == 2, "one put of each writer"


NUM_FOREIGN = 100_000
"""Number of tiny entries of other recipes in the bucket."""

MAX_REQUESTS = 40
"""Requests that one new image may cost beyond those that write its entries."""

PEAK = """
import sys
from pathlib import Path
from pipeline.cache.remote_store import FsspecStore
from pipeline.storage.addresses import Url

keys = sys.argv[2:]
found = FsspecStore(Url(sys.argv[1])).stats("latents", keys)
assert (found[:, 0] > 0).all()
status = Path("/proc/self/status").read_text()
print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))
"""


def peak_kib(cache: str, keys: list[str]) -> int:
    """Return the peak memory of a process that looks up entries."""
    command = [sys.executable, "-c", PEAK, cache, *keys]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return int(done.stdout)


def draw(folder: Path, number: int) -> None:
    """Write a picture that differs from all others, with a caption."""
    rng = np.random.default_rng(number)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    coarse.resize((96, 96), Image.Resampling.BICUBIC).save(folder / f"{number:03}.png")
    (folder / f"{number:03}.txt").write_text(f"picture {number}\n", encoding="utf-8")


@pytest.fixture
def workspace(
    s3: str, proxy: CountingProxy, tiny_sd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Workspace:
    """A recipe on this host without images, whose cache is behind the proxy."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
    workspace = Workspace(tmp_path, tiny_sd)
    workspace.data.mkdir()
    workspace.recipe(cache_dir=f"{s3}/cache")
    return workspace


@pytest.mark.slow
@pytest.mark.parametrize("num_own", [6, 48])
def test_H02_one_new_image_costs_few_requests_and_no_memory_among_many_foreign_entries(
    gateway: Gateway,
    proxy: CountingProxy,
    workspace: Workspace,
    record_property: Callable[[str, object], None],
    *,
    num_own: int,
) -> None:
    for number in range(num_own):
        draw(workspace.data, number)
    assert workspace.execute("cache").success
    cache = str(load_recipe(workspace.file).cache_dir)
    own = fsspec.filesystem("s3", skip_instance_cache=True).find(f"{cache}/latents")
    keys = [name.rpartition("/")[2].removesuffix(".safetensors") for name in own]
    peak_alone = peak_kib(cache, keys)
    fill(gateway.url, cache.removeprefix("s3://"), NUM_FOREIGN)

    counts: list[Counter[str]] = []
    for number in (None, num_own):
        if number is not None:
            draw(workspace.data, number)
        proxy.requests.clear()
        assert workspace.execute("cache").success
        counts.append(proxy.counts())
    unchanged, changed = counts
    peak_among_many = peak_kib(cache, keys)
    record_property("requests without a new image", dict(unchanged))
    record_property("requests with a new image", dict(changed))
    record_property("peak memory in KiB", (peak_alone, peak_among_many))

    assert workspace.report("vae_latents")["encoded"] == 1
    written = changed["PUT"] - unchanged["PUT"]
    assert changed.total() - unchanged.total() - written <= MAX_REQUESTS
    assert changed["LIST"] <= MAX_REQUESTS, "the foreign entries, 1,000 in each request, are not listed"
    assert peak_among_many - peak_alone < 8 * 1024
