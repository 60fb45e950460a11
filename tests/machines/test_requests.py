"""Requests to Ceph's S3 gateway: conditional puts, and what a large cache costs."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pipeline.cache.entry_format import EntrySpec, TensorSpec
from pipeline.cache.store import Store
from pipeline.cache.used_keys import KeyLists
from pipeline.storage.addresses import Url
from pipeline.storage.remote_folder import FileChangedError, RemoteFolder
from tests.machines.ceph import Gateway
from tests.machines.counting_proxy import CountingProxy
from tests.machines.filling import fill


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


def test_of_many_concurrent_writers_exactly_one_replaces_the_version_that_all_have_read(s3: str) -> None:
    folder = RemoteFolder(Url(f"{s3}/out"))
    version = folder.put("lease", b"stale")
    assert version == folder.version("lease")
    answers: list[bool] = []
    start = threading.Barrier(8)

    def write(number: int) -> None:
        start.wait(60)
        try:
            folder.put("lease", b"%d" % number, expected=version)
        except FileChangedError:
            answers.append(False)
        else:
            answers.append(True)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [False] * 7 + [True]
    folder.remove("lease")
    with pytest.raises(FileChangedError):
        folder.put("lease", b"deleted since", expected=version)


def test_a_file_is_not_created_over_one_that_appeared_during_its_upload(s3: str, tmp_path: Path) -> None:
    folder, file = RemoteFolder(Url(f"{s3}/out")), tmp_path / "file"
    file.write_bytes(b"of this machine")
    folder.put("file", b"of another machine")
    with pytest.raises(FileChangedError):
        folder.upload(file, "file", create=True)
    assert folder.read("file") == b"of another machine"
    assert folder.upload(file, "file") == folder.version("file")
    assert folder.read("file") == b"of this machine"


def test_a_valid_entry_that_exists_costs_no_second_put(
    s3: str, proxy: CountingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
    store = Store(Url(f"{s3}/cache"))
    spec = EntrySpec("latents", "ab" * 32, {"latent": TensorSpec("float16", (4, 8, 6))})
    values = {"latent": np.zeros((4, 8, 6), "<f2")}
    assert store.write(spec, values, {})
    assert not store.write(spec, values, {})
    assert proxy.counts()["PUT"] == 2, "one put of each writer"


def test_a_job_with_unchanged_entries_records_their_use_with_three_requests(
    s3: str, proxy: CountingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
    keys = [f"{number:064x}" for number in range(100)]
    KeyLists(Url(f"{s3}/cache"), [keys], log=print).mark()
    proxy.requests.clear()
    KeyLists(Url(f"{s3}/cache"), [keys], log=print).mark()
    assert proxy.counts() == {"PUT": 1, "LIST": 2}


def test_H02_entries_of_a_large_cache_are_looked_up_without_listing_it(
    gateway: Gateway, s3: str, proxy: CountingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 entries in one group of 65,536 groups of keys count as a cache of 20 million entries."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
    store = Store(Url(f"{s3}/cache"))
    own = [f"{start}{number:060x}" for start in ("abcd", "0123", "4567") for number in range(16)]
    for key in own:
        store.folder.replace(f"latents/{key[:2]}/{key}.safetensors", b"entry")
    folder = f"{s3}/cache".removeprefix("s3://")
    fill(gateway.url, folder, [f"abcd{number:060x}" for number in range(1_000, 1_300)])

    counts: list[Counter[str]] = []
    for keys in (own, [*own, "f" * 64]):
        proxy.requests.clear()
        assert store.stats("latents", keys)[: len(own), 0].tolist() == [5] * len(own)
        counts.append(proxy.counts())
    unchanged, with_new = counts
    assert unchanged == {"LIST": 1, "HEAD": len(own)}, "one listing of 316 keys estimates the size"
    # The missing entry costs a HEAD and a listing of its name. In a cache without packs, s3fs lists their
    # folder, and then asks in the same way whether its name is a file.
    assert with_new - unchanged == {"HEAD": 2, "LIST": 3}
