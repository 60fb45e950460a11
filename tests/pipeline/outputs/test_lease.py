"""The lease at an address: one holder at a time, and none for ever."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from pipeline.errors import StoreError
from pipeline.outputs.folder import OutputFolder
from pipeline.outputs.lease import DELETING, STALE_S, Clock, Lease, hold_lease, lease_at
from pipeline.storage.addresses import Url
from pipeline.storage.remote_folder import NoConditionalWritesError, RemoteFolder

NAME = "runs/r/lease"


@pytest.fixture
def address() -> Url:
    return Url(f"memory://{uuid.uuid4().hex}/out")


class FakeClock:
    """A clock on which waiting takes no time; `events` happen at their times while somebody waits."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events: list[tuple[float, Callable[[], object]]] = []

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        for event in [each for each in self.events if each[0] <= self.now_s]:
            self.events.remove(event)
            event[1]()

    def every(self, seconds: float, until_s: float, action: Callable[[], object]) -> None:
        self.events += [(seconds * n, action) for n in range(1, int(until_s / seconds) + 1)]


def lease_of(address: Url, owner: str, clock: FakeClock | None = None, **options: object) -> Lease:
    given = clock or FakeClock()
    return Lease(
        RemoteFolder(address),
        NAME,
        owner=owner,
        clock=Clock(lambda: given.now_s, given.wait),
        **options,  # pyright: ignore[reportArgumentType] - log and doing
    )


def test_a_second_machine_waits_until_the_first_is_done(address: Url) -> None:
    clock, lines = FakeClock(), list[str]()
    first = lease_of(address, "one")
    first.acquire()
    clock.every(15, 300, first.beat)
    clock.events.append((310, first.release))
    lease_of(address, "two", clock, log=lines.append).acquire()
    assert 310 <= clock.now_s < 320
    assert len(lines) == 1
    assert "is training this run; waiting until it finishes or stops" in lines[0]


def test_a_machine_that_waits_names_what_the_holder_does(address: Url) -> None:
    lines: list[str] = []
    lease_of(address, "one", doing=DELETING).acquire()
    lease_of(address, "two", log=lines.append).acquire()
    assert "is deleting this run; waiting until it finishes or stops" in lines[0]


def test_the_lease_of_a_dead_machine_is_taken_over_when_it_is_stale(address: Url) -> None:
    dead, clock = lease_of(address, "dead"), FakeClock()
    dead.acquire()
    lease_of(address, "two", clock).acquire()
    assert STALE_S <= clock.now_s < STALE_S + 10
    assert not dead.is_held()


def test_a_dead_process_with_the_same_local_folder_is_not_waited_for(address: Url) -> None:
    clock, lines = FakeClock(), list[str]()
    lease_of(address, "one").acquire()
    lease_of(address, "one", clock, log=lines.append).acquire()
    assert (lines, clock.now_s) == ([], 0)


def test_machines_that_start_together_hold_it_one_after_the_other(
    address: Url, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, num_held = list[int](), 0

    # fsspec's memory looks for a file and then writes it, which services do in one step.
    at_a_time, write = threading.Lock(), MemoryFileSystem.pipe_file

    @wraps(write)
    def write_at_once(*arguments: Any, **options: Any) -> None:
        with at_a_time:
            write(*arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", write_at_once)

    def work(owner: str) -> None:
        nonlocal num_held
        lease = Lease(RemoteFolder(address), NAME, owner=owner, clock=Clock(wait=lambda _s: None))
        for _ in range(20):
            lease.acquire()
            num_held += 1
            held.append(num_held)
            num_held -= 1
            lease.release()

    threads = [threading.Thread(target=work, args=(owner,)) for owner in ("one", "two", "three")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert held == [1] * 60


def test_a_holder_that_was_replaced_notices_it_and_does_not_release_the_other(address: Url) -> None:
    lines: list[str] = []
    lost, other = lease_of(address, "one", log=lines.append), lease_of(address, "two")
    lost.acquire()
    version, _ = lost.read()
    assert other.acquire_at_once(dead_version=version)
    lost.beat()
    assert lost.lost
    lost.release()
    assert other.is_held()
    assert "another machine took over" in lines[0]
    assert "nothing more is uploaded" in lines[0]


def test_a_holder_notices_that_another_took_over_and_is_already_done(address: Url) -> None:
    """Otherwise, a machine that was suspended would upload its older files over the finished run."""
    lost, other = lease_of(address, "one"), lease_of(address, "two")
    lost.acquire()
    other.acquire()
    other.release()
    lost.beat()
    assert lost.lost


class Interrupted(RemoteFolder):
    """A folder in which another process acts right before a lease is replaced."""

    def __init__(self, url: Url, other: Callable[[], object]) -> None:
        super().__init__(url)
        self._other = other

    def put(self, name: str, data: bytes, *, expected: str = "") -> str:
        self._other()
        return super().put(name, data, expected=expected)


def test_a_heartbeat_does_not_replace_the_lease_of_a_process_that_took_over_since_it_was_read(
    address: Url,
) -> None:
    two = lease_of(address, "two")
    folder = Interrupted(address, lambda: two.acquire_at_once(dead_version=one.read()[0]))
    one = Lease(folder, NAME, owner="one")
    assert one.acquire_at_once()
    one.beat()
    assert one.lost
    assert two.is_held()


def test_only_one_of_two_processes_takes_over_a_lease_that_both_found_stale(address: Url) -> None:
    dead, two = lease_of(address, "dead"), lease_of(address, "two")
    dead.acquire()
    version, _ = dead.read()
    folder = Interrupted(address, lambda: two.acquire_at_once(dead_version=version))
    one = Lease(folder, NAME, owner="one")
    assert not one.acquire_at_once(dead_version=version)
    assert two.is_held()


@pytest.mark.parametrize("content", [b"", b"[1]", b"3"], ids=["empty", "a list", "a number"])
def test_a_lease_that_cannot_be_read_is_lost_and_is_taken_over_only_when_it_is_stale(
    address: Url, content: bytes
) -> None:
    lost, clock = lease_of(address, "one"), FakeClock()
    lost.acquire()
    RemoteFolder(address).put(NAME, content)
    lost.beat()
    assert lost.lost
    lease_of(address, "two", clock).acquire()
    assert clock.now_s >= STALE_S


class IgnoredConditions(RemoteFolder):
    """A service that ignores the conditions of writes."""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        self.put(name, data)
        return True


def test_a_service_that_ignores_conditions_is_refused_and_keeps_no_file(address: Url) -> None:
    folder = IgnoredConditions(address)
    with pytest.raises(NoConditionalWritesError, match="ignores the conditions"):
        Lease(folder, NAME, owner="one").acquire()
    assert folder.list_files() == {}


class RefusedConditions(OutputFolder):
    """An output folder on a service that refuses conditional writes."""

    def connect(self) -> RemoteFolder:
        folder = super().connect()

        def refuse(_name: str, _data: bytes) -> bool:
            raise NoConditionalWritesError("the service refuses conditional writes")

        folder.put_if_absent = refuse  # type: ignore[method-assign]
        return folder


def test_a_service_that_refuses_conditions_is_an_error_with_a_fix(address: Url, tmp_path: object) -> None:
    outputs = RefusedConditions(address, tmp_path)  # pyright: ignore[reportArgumentType]
    with (
        pytest.raises(StoreError, match="refuses conditional writes") as caught,
        hold_lease(outputs, NAME, print),
    ):
        pass
    assert "such as S3" in caught.value.fix


def test_the_file_names_the_machine_and_no_secret(address: Url) -> None:
    lease = lease_of(address, "one")
    lease.acquire()
    content = json.loads(RemoteFolder(address).read(NAME))
    assert set(content) == {"machine", "owner", "token", "beat", "time", "doing"}
    assert content["beat"] == 0
    lease.beat()
    assert json.loads(RemoteFolder(address).read(NAME))["beat"] == 1
    lease.release()
    assert lease.read() == ("", None)


def test_a_local_folder_keeps_its_owner_id(address: Url, tmp_path: object) -> None:
    folder = tmp_path
    one, again = (OutputFolder(address, folder) for _ in range(2))  # pyright: ignore[reportArgumentType]
    assert one.owner == again.owner
    lease_at(one, NAME).acquire()
    assert lease_at(again, NAME).acquire_at_once()
