"""The lease at an address: one holder at a time, and none for ever."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import fsspec
import pytest

from pipeline.storage import lease as leases
from pipeline.storage.addresses import Url
from pipeline.storage.lease import Lease, hold_lease
from pipeline.storage.remote_folder import RemoteFolder


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"HEARTBEAT_S": 0.2, "STALE_S": 2.0, "SETTLE_S": 0.2, "_POLL_S": 0.05}.items():
        monkeypatch.setattr(leases, name, seconds)


@pytest.fixture(params=["with conditional put", "without", "s3"])
def make_lease(request: pytest.FixtureRequest, tmp_path: Any) -> Callable[..., Lease]:
    """Returns leases of one file, on a service with or without conditional writes."""
    top = Url(f"memory://leases{abs(hash(tmp_path))}")
    if request.param == "s3":
        request.getfixturevalue("s3")
        bucket = f"leases-{uuid.uuid4().hex[:8]}"
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
        top = Url(f"s3://{bucket}/out")

    def make(copy_id: str, lines: list[str] | None = None, doing: str = leases.TRAINING) -> Lease:
        folder = RemoteFolder(top)
        if request.param == "without":
            folder.put_if_absent = lambda name, data: None  # type: ignore[method-assign]
        log = [].append if lines is None else lines.append
        return Lease(folder, "runs/r/lease", copy_id=copy_id, log=log, doing=doing)

    return make


def in_thread(lease: Lease, held: list[str], seconds: float = 0.0) -> threading.Thread:
    def work() -> None:
        with hold_lease(lease):
            held.append(f"{lease._copy_id} begins")
            time.sleep(seconds)
            held.append(f"{lease._copy_id} ends")

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_second_machine_waits_until_the_first_is_done(make_lease: Callable[..., Lease]) -> None:
    held: list[str] = []
    lines: list[str] = []
    first = in_thread(make_lease("one"), held, seconds=4.0)  # longer than STALE_S: heartbeats keep the lease
    while not held:
        time.sleep(0.01)
    second = in_thread(make_lease("two", lines), held)
    first.join()
    second.join()
    assert held == ["one begins", "one ends", "two begins", "two ends"]
    assert len(lines) == 1
    assert "is training this run" in lines[0]


def test_a_machine_that_waits_names_what_the_holder_does(make_lease: Callable[..., Lease]) -> None:
    lines: list[str] = []
    make_lease("one", doing=leases.DELETING).acquire()
    with hold_lease(make_lease("two", lines)):
        assert "is deleting this run; waiting until it finishes or stops" in lines[0]


def test_a_lease_of_an_earlier_version_is_that_of_a_training(make_lease: Callable[..., Lease]) -> None:
    lines: list[str] = []
    old = make_lease("one")
    old._folder.put(old._name, b'{"machine": "b", "copy": "one", "token": "x", "beat": 3}')
    with hold_lease(make_lease("two", lines)):
        assert lines == ["b is training this run; waiting until it finishes or stops"]


def test_two_machines_that_start_together_hold_it_one_after_the_other(
    make_lease: Callable[..., Lease],
) -> None:
    held: list[str] = []
    for thread in [in_thread(make_lease(name), held, seconds=0.5) for name in ("one", "two", "three")]:
        thread.join()
    begun = [line.split()[0] for line in held]
    assert len(held) == 6
    assert begun[0::2] == begun[1::2], held


def test_the_lease_of_a_dead_machine_is_taken_over_when_it_is_stale(make_lease: Callable[..., Lease]) -> None:
    make_lease("dead").acquire()
    started_s = time.monotonic()
    with hold_lease(make_lease("two")):
        assert time.monotonic() - started_s >= leases.STALE_S


def test_a_dead_process_with_the_same_working_copy_is_not_waited_for(
    make_lease: Callable[..., Lease],
) -> None:
    lines: list[str] = []
    make_lease("one").acquire()
    with hold_lease(make_lease("one", lines)):
        assert lines == []


def test_a_holder_that_was_replaced_notices_it_and_does_not_release_the_other(
    make_lease: Callable[..., Lease],
) -> None:
    other = make_lease("two")
    with hold_lease(make_lease("one")) as lost:
        other._take_over("", settle_s=0.0)
        while not lost.lost:
            time.sleep(0.01)
    current = other.read()
    assert current is not None
    assert current["copy"] == "two"


@pytest.mark.parametrize("make_lease", ["s3"], indirect=True)
def test_a_heartbeat_does_not_replace_the_lease_of_a_process_that_took_over_since_it_was_read(
    make_lease: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = make_lease("one"), make_lease("two")
    read = one._folder.read

    def read_before_takeover(name: str) -> bytes:
        content = read(name)
        two._take_over("", settle_s=0.0)
        return content

    with hold_lease(one):
        monkeypatch.setattr(one._folder, "read", read_before_takeover)
        deadline_s = time.monotonic() + 20 * leases.HEARTBEAT_S
        while not one.lost and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert one.lost
    assert two.is_held()


@pytest.mark.parametrize("make_lease", ["s3"], indirect=True)
def test_only_one_of_two_processes_takes_over_a_lease_that_both_found_stale(
    make_lease: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_lease("dead").acquire()
    one, two = make_lease("one"), make_lease("two")
    stale, read = one.read(), one._folder.read
    monkeypatch.setattr(leases, "SETTLE_S", 0.0)

    def read_before_takeover(name: str) -> bytes:
        content = read(name)
        monkeypatch.setattr(one._folder, "read", read)
        assert two.acquire_at_once(stale=stale)
        return content

    monkeypatch.setattr(one._folder, "read", read_before_takeover)
    assert not one.acquire_at_once(stale=stale)
    assert two.is_held()


@pytest.mark.parametrize("make_lease", ["with conditional put", "s3"], indirect=True)
@pytest.mark.parametrize("waits", [True, False])
def test_a_lease_that_is_released_and_created_by_another_meanwhile_is_not_replaced(
    make_lease: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch, *, waits: bool
) -> None:
    holder, one, two = make_lease("holder"), make_lease("one"), make_lease("two")
    holder.acquire()
    read, version, held = one._folder.read, one._folder.version, list[bool]()

    def release_before(name: str) -> str:
        monkeypatch.setattr(one._folder, "version", version)
        holder.release()
        return version(name)

    def acquire_after(name: str) -> bytes:
        monkeypatch.setattr(one._folder, "read", read)
        try:
            return read(name)
        finally:
            two.acquire()

    monkeypatch.setattr(one._folder, "version", release_before)
    monkeypatch.setattr(one._folder, "read", acquire_after)
    if waits:
        monkeypatch.setattr(one, "_log", lambda _line: (held.append(two.is_held()), two.release()))
        one.acquire()
        assert held == [True]
    else:
        assert not one.acquire_at_once()
        assert two.is_held()


def test_a_holder_notices_that_another_took_over_and_is_already_done(
    make_lease: Callable[..., Lease],
) -> None:
    """Otherwise, a machine that was suspended would upload its older files over the finished run."""
    other = make_lease("two")
    with hold_lease(make_lease("one")) as lost:
        other._take_over("", settle_s=0.0)
        other.release()
        deadline_s = time.monotonic() + 20 * leases.HEARTBEAT_S
        while not lost.lost and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert lost.lost


@pytest.mark.parametrize("content", [b"", b"[1]", b"3"])
def test_a_lease_that_cannot_be_read_is_lost_and_is_taken_over_only_when_it_is_stale(
    make_lease: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(leases, "STALE_S", 0.8)
    with hold_lease(make_lease("one")) as lost:
        lost._folder.put("runs/r/lease", content)
        deadline_s = time.monotonic() + 20 * leases.HEARTBEAT_S
        while not lost.lost and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert lost.lost
    started_s = time.monotonic()
    with hold_lease(make_lease("two")):
        assert time.monotonic() - started_s >= leases.STALE_S


def test_a_lease_that_vanishes_during_a_takeover_is_not_an_error(
    make_lease: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = make_lease("one")
    put = lease._folder.put

    def put_and_remove(name: str, data: bytes, **options: str) -> str:
        version = put(name, data, **options)
        lease._folder.remove(name)
        return version

    monkeypatch.setattr(lease._folder, "put", put_and_remove)
    assert not lease._take_over("", settle_s=0.0)


def test_the_file_names_the_machine_and_no_secret(make_lease: Callable[..., Lease]) -> None:
    lease = make_lease("one")
    lease.acquire()
    assert set(lease.read() or {}) == {"machine", "copy", "token", "beat", "time", "doing"}
    assert json.loads(lease._folder.read("runs/r/lease"))["beat"] == 0
    lease.release()
    assert lease.read() is None
