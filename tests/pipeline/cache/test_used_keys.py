"""Lists of used keys: what jobs write, what gc reads, and how the two exclude each other."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import fsspec
import pytest

from pipeline.cache.backends import access_fix, cache_folder
from pipeline.cache.folder import CacheFile
from pipeline.cache.local_folder import LocalFolder
from pipeline.cache.used_keys import DEAD_S, FOLDER, KeyLists, UsedKeys, are_in, key_array
from pipeline.errors import StoreError
from pipeline.storage.addresses import Url
from pipeline.storage.remote_folder import ACCESS_FIX
from tests.pipeline.namespaces import namespace
from tests.pipeline.used_case import OLD_S, forget_use, lists, make_old, use, used

KEEP_S = 30 * 24 * 3600.0


def keys_from(start: int, count: int) -> list[str]:
    return [hashlib.sha256(str(number).encode()).hexdigest() for number in range(start, start + count)]


KEYS = keys_from(0, 5)


@pytest.fixture
def remote() -> Iterator[Url]:
    name = uuid.uuid4().hex
    yield Url(f"memory://{name}")
    memory = fsspec.filesystem("memory")
    if memory.exists(f"/{name}"):
        memory.rm(f"/{name}", recursive=True)


def files_in(url: Url) -> dict[str, Any]:
    """Return the objects of fsspec in the folder of the lists, by name."""
    store = fsspec.filesystem("memory").store
    prefix = f"/{str(url).removeprefix('memory://')}/{FOLDER}/"
    return {name.removeprefix(prefix): file for name, file in store.items() if name.startswith(prefix)}


def states(root: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in lists(root)}


def test_keys_are_found_among_sorted_ones_whatever_their_last_bytes() -> None:
    zeros = ["00" * 32, "ab" + "00" * 31, "ab" * 32, "ff" * 32]
    keys = key_array([*zeros[1:], *zeros[1:], *KEYS])
    assert len(keys) == 3 + len(KEYS)
    assert keys.tobytes() == b"".join(sorted(map(bytes.fromhex, {*zeros[1:], *KEYS})))
    assert are_in(key_array(zeros), keys).tolist() == [False, True, True, True]
    assert are_in(keys, key_array([])).tolist() == [False] * len(keys)


def test_gc_reads_the_keys_of_all_jobs_and_groups(tmp_path: Path) -> None:
    KeyLists(tmp_path, [KEYS[:2], KEYS[2:3], []], log=print).mark()
    use(tmp_path, KEYS[3:4])
    assert used(tmp_path) == set(KEYS[:4])
    first = next(path for path in lists(tmp_path) if path.stat().st_size == 64)
    assert first.read_bytes() == bytes.fromhex("".join(sorted(KEYS[:2])))
    assert first.stem == hashlib.sha256(first.read_bytes()).hexdigest()


def test_the_same_keys_in_any_order_are_not_written_again(tmp_path: Path) -> None:
    use(tmp_path, KEYS)
    before = states(tmp_path)
    use(tmp_path, [*reversed(KEYS), KEYS[0]])
    assert states(tmp_path) == before


def test_one_new_key_among_many_rewrites_one_list_of_many(tmp_path: Path) -> None:
    keys = keys_from(0, 70_000)
    use(tmp_path, keys)
    before = states(tmp_path)
    assert len(before) == 16
    assert max(path.stat().st_size for path in lists(tmp_path)) < 32 * 70_000 / 10
    use(tmp_path, [*keys, *keys_from(70_000, 1)])
    after = states(tmp_path)
    assert before.items() <= after.items()
    assert len(after) == 17
    assert used(tmp_path) == set(keys_from(0, 70_001))


def test_a_list_is_marked_again_only_some_hours_after_the_last_time(tmp_path: Path) -> None:
    use(tmp_path, KEYS)
    (path,) = lists(tmp_path)
    for hours, is_marked in ((1.9, False), (2.1, True)):
        marked_s = time.time() - hours * 3600
        os.utime(path, (marked_s, marked_s))
        use(tmp_path, KEYS)
        assert (path.stat().st_mtime > marked_s + 60) == is_marked


def test_a_long_job_marks_its_lists_again_until_it_ends(tmp_path: Path) -> None:
    used_by_job = KeyLists(tmp_path, [KEYS], log=print)
    used_by_job.mark()
    with used_by_job.kept_marked(every_s=0.01):
        forget_use(tmp_path)
        deadline_s = time.monotonic() + 30
        (path,) = lists(tmp_path)
        while path.stat().st_mtime == OLD_S and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert path.stat().st_mtime > OLD_S
    forget_use(tmp_path)
    assert path.stat().st_mtime == OLD_S, "the thread has ended"


def test_a_failure_to_mark_again_is_a_warning_and_is_repeated(tmp_path: Path) -> None:
    log: list[str] = []
    used_by_job = KeyLists(tmp_path, [KEYS], log=log.append)
    used_by_job.mark()
    (tmp_path / FOLDER).rename(tmp_path / "moved")
    (tmp_path / FOLDER).write_text("not a folder")
    with used_by_job.kept_marked(every_s=0.01):
        deadline_s = time.monotonic() + 30
        while len(log) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert "warning: the entries that the job uses cannot be recorded in the cache" in log[1]


def test_lists_of_long_ago_do_not_count_and_may_be_deleted(tmp_path: Path) -> None:
    use(tmp_path, KEYS[:1])
    forget_use(tmp_path)
    use(tmp_path, KEYS[1:])
    keys = UsedKeys(tmp_path, KEEP_S)
    keys.read()
    assert (len(keys.keys), keys.num_lists) == (4, 1)
    assert list(keys.expired.values()) == [32]


def test_only_new_lists_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    class RecordingFolder(LocalFolder):
        def read(self, name: str) -> bytes:
            names.append(name)
            return super().read(name)

    monkeypatch.setattr("pipeline.cache.used_keys.cache_folder", RecordingFolder)
    use(tmp_path, KEYS[:1])
    keys = UsedKeys(tmp_path, KEEP_S)
    assert len(keys.read()) == len(keys.read()) == len(names) == 1
    use(tmp_path, KEYS[1:2])
    assert len(keys.read()) == len(names) == 2


def test_lists_and_entries_of_unknown_age_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some services do not state when a file was written."""

    class AgelessFolder(LocalFolder):
        def files_in(self, folder: str) -> list[CacheFile]:
            return [replace(file, modified_s=None) for file in super().files_in(folder)]

    use(tmp_path, KEYS)
    forget_use(tmp_path)
    monkeypatch.setattr("pipeline.cache.used_keys.cache_folder", AgelessFolder)
    keys = UsedKeys(tmp_path, KEEP_S)
    assert len(keys.read()) == len(KEYS)
    assert (keys.expired, keys.since_s) == ({}, None)
    before = states(tmp_path)
    use(tmp_path, KEYS)
    assert states(tmp_path) == before


@pytest.mark.parametrize("years", [-50, 50])
def test_ages_do_not_depend_on_the_clock_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, years: int
) -> None:
    use(tmp_path, KEYS[:1])
    forget_use(tmp_path)
    use(tmp_path, KEYS[1:])
    before = states(tmp_path)
    now_s = time.time()
    monkeypatch.setattr("time.time", lambda: now_s + years * 365 * 24 * 3600)
    assert len(UsedKeys(tmp_path, KEEP_S).read()) == 4
    use(tmp_path, KEYS[1:])
    assert states(tmp_path) == before


def test_a_damaged_list_is_an_error_and_not_an_empty_one(tmp_path: Path) -> None:
    use(tmp_path, KEYS)
    (path,) = lists(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match="a list of used entries is damaged") as excinfo:
        UsedKeys(tmp_path, KEEP_S).read()
    assert excinfo.value.where == str(path)
    assert excinfo.value.fix


@pytest.mark.parametrize("num_bytes", [1, 31, 33, 1000])
def test_a_list_of_no_keys_with_the_hash_of_its_bytes_is_damaged_too(tmp_path: Path, num_bytes: int) -> None:
    use(tmp_path, KEYS)
    content = b"k" * num_bytes
    path = lists(tmp_path)[0].with_name(f"{hashlib.sha256(content).hexdigest()}.keys")
    path.write_bytes(content)
    with pytest.raises(StoreError, match="a list of used entries is damaged") as excinfo:
        UsedKeys(tmp_path, KEEP_S).read()
    assert excinfo.value.where == str(path)


def test_a_list_that_another_gc_deletes_meanwhile_is_omitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BusyFolder(LocalFolder):
        def read(self, name: str) -> bytes:
            (tmp_path / name).unlink()
            return super().read(name)

    use(tmp_path, KEYS)
    monkeypatch.setattr("pipeline.cache.used_keys.cache_folder", BusyFolder)
    assert len(UsedKeys(tmp_path, KEEP_S).read()) == 0


def test_a_cache_without_lists_is_not_changed(tmp_path: Path) -> None:
    keys = UsedKeys(tmp_path / "cache", KEEP_S)
    assert (len(keys.read()), keys.since_s) == (0, None)
    use(tmp_path, [])
    assert list(tmp_path.iterdir()) == []


ACTIONS: dict[str, Callable[[Path], object]] = {
    "cannot be recorded": lambda cache: use(cache, KEYS),
    "cannot be read": lambda cache: UsedKeys(cache, KEEP_S),
}


@pytest.mark.parametrize("message", ACTIONS)
def test_a_cache_that_refuses_access_is_an_error_with_its_location_and_a_fix(
    tmp_path: Path, message: str
) -> None:
    (tmp_path / FOLDER).write_text("not a folder")
    with pytest.raises(StoreError, match=message) as excinfo:
        ACTIONS[message](tmp_path)
    assert excinfo.value.where == f"{tmp_path}/{FOLDER}"
    assert excinfo.value.fix
    assert "[Errno" not in excinfo.value.what, "the error of the system is put into words"


def test_the_fix_of_a_refused_access_follows_from_the_kind_of_cache_and_the_error(tmp_path: Path) -> None:
    assert access_fix(Url("memory://cache"), OSError("refused")) == ACCESS_FIX
    assert access_fix(tmp_path, OSError("refused")) == "make sure that cache_dir is on a working disk"
    assert "free space" in access_fix(tmp_path, OSError(errno.ENOSPC, "No space left on device"))


USE_TWICE = """
import sys
from pathlib import Path
from pipeline.cache.used_keys import KeyLists
used = KeyLists(Path(sys.argv[1]), [["ab" * 32]], log=print)
used.mark()
used.mark()
"""


def test_a_job_with_a_read_only_cache_gets_one_warning(tmp_path: Path) -> None:
    mount = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'
    completed = subprocess.run(
        [*namespace(), "sh", "-c", mount, "sh", tmp_path, sys.executable, "-c", USE_TWICE, tmp_path],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert completed.returncode == 0, completed.stderr
    (warning,) = completed.stdout.splitlines()
    assert warning.startswith("warning: the entries that the job uses cannot be recorded in the cache")
    assert "do not run latentline gc --delete until the job has ended" in warning
    assert list(tmp_path.iterdir()) == []


AS_NOBODY = f"""
import os
import pipeline.cache.used_keys
os.setgid(65534)
os.setuid(65534)
{USE_TWICE}
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_a_shared_cache_records_and_marks_the_same_keys(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    use(cache, ["ab" * 32])
    for path in (cache, cache / FOLDER):
        path.chmod(0o777)
    for parent in tmp_path.parents:
        if parent.is_relative_to("/tmp") and parent != Path("/tmp"):
            parent.chmod(0o755)
    tmp_path.chmod(0o755)
    forget_use(cache)
    completed = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, cache],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert (completed.returncode, completed.stdout) == (0, ""), completed.stderr
    (path,) = lists(cache)
    assert (path.stat().st_uid, path.stat().st_mtime > OLD_S) == (65534, True)


def test_no_job_records_keys_of_a_local_cache_while_gc_deletes(tmp_path: Path) -> None:
    use(tmp_path, KEYS[:1])
    keys = UsedKeys(tmp_path, KEEP_S)
    job = threading.Thread(target=use, args=(tmp_path, KEYS[1:2]))
    with keys.deleting():
        job.start()
        job.join(0.2)
        assert job.is_alive(), "the job waits for the end of the deletion"
        assert len(keys.keys) == 1
    job.join(30)
    with keys.deleting():
        assert len(keys.keys) == 2


def test_a_job_with_a_remote_cache_waits_until_the_announced_deletion_has_ended(remote: Url) -> None:
    """The gc has listed an expired list before the job marks it, and deletes it then."""
    use(remote, KEYS)
    (name,) = [each for each in files_in(remote) if each.endswith(".keys")]
    files_in(remote)[name].created = datetime(2001, 9, 9, tzinfo=UTC)
    keys, log, waits = UsedKeys(remote, KEEP_S), list[str](), list[float]()
    deletion = keys.deleting()
    deletion.__enter__()
    assert list(keys.expired) == [f"{FOLDER}/{name}"]

    def end_deletion(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            cache_folder(remote).delete(f"{FOLDER}/{name}")
            deletion.__exit__(None, None, None)

    KeyLists(remote, [KEYS], log=log.append, sleep=end_deletion).mark()
    assert len(waits) == 3
    assert log == ["waiting for latentline gc, which is deleting entries of the cache"]
    assert used(remote) == set(KEYS)


def test_a_job_does_not_wait_for_deletions_that_begin_after_it_has_recorded_its_keys(remote: Url) -> None:
    keys = UsedKeys(remote, KEEP_S)
    deletions = [keys.deleting() for _ in range(3)]
    deletions[0].__enter__()
    waits: list[float] = []

    def next_deletion(seconds: float) -> None:
        waits.append(seconds)
        deletions[len(waits)].__enter__()
        deletions[len(waits) - 1].__exit__(None, None, None)
        assert len(keys.keys) == len(KEYS)

    KeyLists(remote, [KEYS], log=print, sleep=next_deletion).mark()
    assert len(waits) == 1


@pytest.mark.parametrize("is_old", [True, False])
def test_a_killed_gc_delays_a_job_with_a_remote_cache_for_a_limited_time(remote: Url, is_old: bool) -> None:
    cache_folder(remote).replace(f"{FOLDER}/deleting-1", b"")
    if is_old:
        now = files_in(remote)["deleting-1"].created
        files_in(remote)["deleting-1"].created = now - timedelta(seconds=DEAD_S + 1)
    waits: list[float] = []
    KeyLists(remote, [KEYS], log=print, sleep=waits.append).mark()
    assert sum(waits) == (0 if is_old else DEAD_S)
    assert used(remote) == set(KEYS)


def test_gc_of_a_remote_cache_deletes_nothing_after_half_of_that_time(remote: Url) -> None:
    before_s = time.time()
    with UsedKeys(remote, KEEP_S).deleting() as until_s:
        assert before_s + DEAD_S / 2 <= until_s <= time.time() + DEAD_S / 2
        assert len(files_in(remote)) == 1
    assert files_in(remote) == {}


@pytest.mark.parametrize("place", ["local", "remote"])
def test_H01_an_entry_that_a_job_finds_after_recording_it_is_never_deleted(
    tmp_path: Path, remote: Url, place: str
) -> None:
    """Jobs start while gc deletes everything that no job uses."""
    cache_dir = tmp_path / "cache" if place == "local" else remote
    cache, keys = cache_folder(cache_dir), keys_from(0, 300)
    for key in keys:
        cache.replace(f"latents/{key}", b"")
    use(cache_dir, KEYS[:1])
    found: dict[str, set[str]] = {}

    def existing() -> set[str]:
        return {file.name for file in cache.files_in("latents")}

    def job(number: int) -> None:
        own = set(keys[number::4][: 20 + number])
        KeyLists(cache_dir, [own], log=lambda _: None, sleep=lambda _: time.sleep(0.001)).mark()
        found[f"job {number}"] = own & existing()

    jobs = [threading.Thread(target=job, args=(number,)) for number in range(4)]
    gc = UsedKeys(cache_dir, KEEP_S)
    for number, start in enumerate(range(0, len(keys), 10)):
        if number in (3, 7, 11, 15):
            jobs[number // 4].start()
        with gc.deleting():
            for key, is_used in zip(
                keys[start : start + 10],
                are_in(unsorted_keys(keys[start : start + 10]), gc.keys),
                strict=True,
            ):
                if not is_used:
                    cache.delete(f"latents/{key}")
    for each in jobs:
        each.join(60)
    assert len(found) == 4
    assert set().union(*found.values()) <= existing()
    assert len(existing()) < len(keys) / 2


def unsorted_keys(keys: list[str]) -> Any:
    import numpy as np

    return np.array([bytes.fromhex(key) for key in keys], "S32")


def test_all_times_are_those_of_the_cache(tmp_path: Path) -> None:
    use(tmp_path, KEYS)
    make_old(tmp_path)
    keys = UsedKeys(tmp_path, 60)
    keys.read()
    assert keys.since_s == OLD_S
    assert abs(keys.oldest_kept_s + 60 - (tmp_path / FOLDER / "clock").stat().st_mtime) < 1
