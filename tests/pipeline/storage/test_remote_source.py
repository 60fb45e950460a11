"""Datasets on a server that is away for a short time or for good."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import fsspec
import pytest

from pipeline.errors import DatasetError
from pipeline.storage.addresses import Url
from pipeline.storage.remote_source import RemoteSource
from pipeline.storage.retry import retry
from pipeline.storage.source import MAX_BUFFERED_BYTES
from tests.remote_folders import S3_ENVIRONMENT, StoppableS3Server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> StoppableS3Server:
    """An S3 server that has not been started, as that of this process's environment."""
    server = StoppableS3Server()
    for name, value in {**S3_ENVIRONMENT, "AWS_ENDPOINT_URL_S3": server.url}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # the library's own attempts would hide those of the project
    return server


@pytest.mark.slow
def test_O13_a_dataset_waits_for_an_s3_server_that_restarts(server: StoppableS3Server) -> None:
    server.start()
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    files.mkdir("photos")
    files.pipe_file("photos/a.png", b"pixels")
    source = RemoteSource(Url("s3://photos"))
    assert source.read("a.png") == b"pixels"

    requests: dict[str, Callable[[], object]] = {
        "read": lambda: source.read("a.png"),
        "read_start": lambda: source.read_start("a.png", 3),
        "open": lambda: source.open("a.png", MAX_BUFFERED_BYTES + 1).read(),
        "list_folder": lambda: [item.path for item in source.list_folder("")],
    }
    server.stop()
    with ThreadPoolExecutor(len(requests)) as pool:
        futures = {name: pool.submit(send) for name, send in requests.items()}
        done, _ = wait(futures.values(), timeout=2)
        assert not done, "no request has an answer or an error while the server is away"

        server.start()
        try:
            answers = {name: future.result(30) for name, future in futures.items()}
        finally:
            server.stop()
    assert answers == {"read": b"pixels", "read_start": b"pix", "open": b"pixels", "list_folder": ["a.png"]}


@pytest.mark.parametrize("has_answered", [False, True])
def test_a_dataset_on_a_server_that_is_away_for_good_is_an_error(
    server: StoppableS3Server, monkeypatch: pytest.MonkeyPatch, *, has_answered: bool
) -> None:
    """Only the first request after an answer waits; thousands of images must not wait a minute each."""
    monkeypatch.setattr("pipeline.storage.retry.RETRY_S", 1.0)
    source = RemoteSource(Url("s3://empty"))
    if has_answered:
        server.start()
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir("empty")
        assert source.list_folder("") == []
        server.stop()

    repeated: list[str] = []

    def recorded_retry(send: Callable[[], bytes]) -> bytes:
        repeated.append(name)
        return retry(send)

    monkeypatch.setattr("pipeline.storage.remote_source.retry", recorded_retry)
    for name in ("first.png", "second.png", "third.png"):
        with pytest.raises(OSError, match="connect"):
            source.read(name)
    assert repeated == (["first.png"] if has_answered else [])


@pytest.mark.parametrize(
    "url",
    ["reference://::memory://x.json", "dir::memory://x", "zip://a::generic://x", "jupyter://x", "data://x"],
)
def test_an_address_outside_the_list_is_opened_by_nothing(url: str) -> None:
    # Files of a shared cache may contain addresses, which no recipe has checked.
    with pytest.raises(DatasetError, match="the address must not use"):
        RemoteSource(Url(url))


def tar_of(content: bytes) -> bytes:
    """Return an archive with one member; two of contents of equal size differ in nothing else."""
    member = tarfile.TarInfo("a.png")
    member.size, member.mtime = len(content), 1_700_000_000
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def put_on_disk(content: bytes, folder: Path) -> str:
    path = folder / "photos.tar"
    path.write_bytes(content)
    os.utime(path, (1_700_000_000, 1_700_000_000))
    return str(path)


def put_in_bucket(content: bytes, folder: Path) -> str:
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    files.makedirs("archives", exist_ok=True)
    files.pipe_file("archives/photos.tar", content)
    return "s3://archives/photos.tar"


@pytest.mark.parametrize("put", [put_on_disk, put_in_bucket], ids=["disk", "s3"])
def test_a_member_of_a_replaced_archive_has_changed_with_equal_size_and_time(
    put: Callable[[bytes, Path], str], server: StoppableS3Server, tmp_path: Path
) -> None:
    """Tar stores no checksum of a member, so the version of the archive counts."""

    def stat_of(content: bytes) -> list[int]:
        url = Url(f"tar://::{put(tar_of(content), tmp_path)}")
        return RemoteSource(url).stats(["a.png"]).tolist()[0]

    # fsspec opens the inner link with a cached file system, perhaps the one of another test's server.
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    server.start()
    try:
        before, after = stat_of(b"pixels"), stat_of(b"others")
        again = RemoteSource(Url(f"tar://::{put_in_bucket(tar_of(b'others'), tmp_path)}")).stats(["a.png"])
    finally:
        server.stop()
    assert before[:2] == after[:2]
    assert [before[column] for column in RemoteSource.compared_columns] != [
        after[column] for column in RemoteSource.compared_columns
    ]
    if put is put_in_bucket:
        assert again.tolist()[0] == after


def test_a_member_of_a_local_archive_changed_when_the_archive_did(tmp_path: Path) -> None:
    """A second change within the clock's granularity would leave the stat of the first."""
    path = put_on_disk(tar_of(b"pixels"), tmp_path)
    (stat,) = RemoteSource(Url(f"tar://::{path}")).stats(["a.png"]).tolist()
    assert stat[2] == Path(path).stat().st_ctime_ns
