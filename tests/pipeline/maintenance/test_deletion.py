"""Many files of a cache are deleted at once, on a disk and remotely."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path

import fsspec
import pytest

from pipeline.cache.backends import cache_folder
from pipeline.cache.local_folder import LocalFolder
from pipeline.errors import StoreError
from pipeline.maintenance.deletion import delete_files
from pipeline.storage.addresses import Address, Url


@pytest.fixture(params=["folder", "s3"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Address:
    if request.param == "folder":
        return tmp_path
    request.getfixturevalue("s3")
    bucket = f"bucket-{uuid.uuid4().hex[:8]}"
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
    return Url(f"s3://{bucket}/cache")


@pytest.mark.parametrize("count", [0, 17, 300])
def test_only_the_named_files_are_deleted(address: Address, count: int) -> None:
    cache = cache_folder(address)
    count = count if isinstance(address, Path) else count // 6
    names = [f"latents/{number}" for number in range(count + 2)]
    for number, name in enumerate(names):
        cache.replace(name, b"x" * number)
    sizes = {name: number for number, name in enumerate(names[:count])}
    assert delete_files(cache, sizes) == sizes
    assert sorted(file.name for file in cache.files()) == sorted(names[count:])


def test_files_that_no_longer_exist_are_not_counted(tmp_path: Path) -> None:
    cache = cache_folder(tmp_path)
    cache.replace("one", b"x")
    assert delete_files(cache, {"one": 1, "gone": 5}) == {"one": 1}


def test_slow_requests_are_sent_at_the_same_time(tmp_path: Path) -> None:
    both_sent = threading.Barrier(2, timeout=20)

    class SlowFolder(LocalFolder):
        def delete(self, name: str) -> None:
            if name in ("0", "32"):  # of different threads
                both_sent.wait()  # BrokenBarrierError if the files are deleted one after another
            super().delete(name)

    cache = SlowFolder(tmp_path)
    for number in range(64):
        cache.replace(str(number), b"")
    assert len(delete_files(cache, {str(number): 0 for number in range(64)})) == 64


def test_an_error_names_the_file(tmp_path: Path) -> None:
    cache = cache_folder(tmp_path)
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    with pytest.raises(StoreError, match="a file of the cache cannot be deleted") as excinfo:
        delete_files(cache, {"folder": 0})
    assert excinfo.value.where == str(tmp_path / "folder")
    assert excinfo.value.fix
