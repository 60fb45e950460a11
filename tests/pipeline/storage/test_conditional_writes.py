"""The contract of conditional writes, on each service that has them; tests/machines has it on Ceph."""

from __future__ import annotations

import errno
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from pipeline.storage.addresses import Url
from pipeline.storage.remote_folder import (
    CONDITIONAL_WRITES,
    FileChangedError,
    NoConditionalWritesError,
    RemoteFolder,
)


@pytest.fixture(params=["memory", "s3"])
def folder(request: pytest.FixtureRequest) -> RemoteFolder:
    bucket = f"bucket-{uuid.uuid4().hex[:8]}"
    if request.param == "s3":
        request.getfixturevalue("s3")
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
    return RemoteFolder(Url(f"{request.param}://{bucket}/out"))


def test_a_file_is_created_only_if_it_does_not_exist(folder: RemoteFolder) -> None:
    assert folder.put_if_absent("a/b", b"first")
    assert not folder.put_if_absent("a/b", b"second")
    assert folder.read("a/b") == b"first"
    folder.remove("a/b")
    assert folder.put_if_absent("a/b", b"third")


def test_a_file_is_replaced_only_if_it_still_has_the_expected_version(folder: RemoteFolder) -> None:
    folder.put("a", b"first")
    first = folder.version("a")
    second = folder.put("a", b"second", expected=first)
    assert second == folder.version("a") != first
    with pytest.raises(FileChangedError):
        folder.put("a", b"third", expected=first)
    assert folder.read("a") == b"second"
    folder.remove("a")
    with pytest.raises(FileChangedError):
        folder.put("a", b"fourth", expected=second)
    assert folder.list_files() == {}


def test_of_many_writers_exactly_one_creates_and_one_replaces_a_file(folder: RemoteFolder) -> None:
    folder.put("old", b"x")
    version, start = folder.version("old"), threading.Barrier(6)
    created, replaced = list[bool](), list[bool]()

    def write(number: int) -> None:
        start.wait(60)
        created.append(folder.put_if_absent("new", b"%d" % number))
        try:
            folder.put("old", b"%d" % number, expected=version)
            replaced.append(True)
        except FileChangedError:
            replaced.append(False)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (sorted(created), sorted(replaced)) == ([False] * 5 + [True], [False] * 5 + [True])


def test_a_service_without_conditional_writes_says_so(tmp_path: Path) -> None:
    folder = RemoteFolder(Url(f"dir://out::{tmp_path}"))
    with pytest.raises(NoConditionalWritesError):
        folder.put_if_absent("a", b"x")
    with pytest.raises(NoConditionalWritesError):
        folder.put("a", b"x", expected="1")
    assert {"s3", "s3a", "memory"} == CONDITIONAL_WRITES


class ResponseError(Exception):
    """An error of botocore."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}


@pytest.mark.parametrize(
    ("status", "expected"), [(501, NoConditionalWritesError), (400, NoConditionalWritesError), (403, OSError)]
)
def test_a_service_that_refuses_a_condition_is_told_from_one_that_refuses_the_user(
    s3: str, status: int, expected: type[OSError]
) -> None:
    folder = RemoteFolder(Url("s3://bucket/out"))

    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise OSError(errno.EINVAL, "refused") from ResponseError(status)

    folder.files.pipe_file = refuse
    writes: list[Callable[[], object]] = [
        lambda: folder.put_if_absent("a", b"x"),
        lambda: folder.put("a", b"x", expected="1"),
    ]
    for write in writes:
        with pytest.raises(OSError, match="refuse") as caught:
            write()
        assert type(caught.value) is expected, s3
