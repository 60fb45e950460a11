"""The watch over other machines: their errors arrive, and their silence is noticed."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from pipeline.errors import LatentlineError, LaunchError, StoreError
from pipeline.processes.machines import Machines
from pipeline.processes.worker import failure_board
from pipeline.processes.worker import other_machines as module
from pipeline.processes.worker.failure_board import FailureBoard
from pipeline.processes.worker.other_machines import MachineWatch, explained

BEAT_S = 0.05


@pytest.fixture
def machines() -> Generator[list[Machines]]:
    """Two machines whose meeting point is a store of this process."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    yield [Machines(2, rank, "127.0.0.1", store.port) for rank in (0, 1)]
    del store


def watch(machines: Machines, ended: list[LatentlineError], **seconds: float) -> MachineWatch:
    times = {"beat_s": BEAT_S, "silence_s": 1.0, "start_s": 1.0} | seconds
    return MachineWatch(machines, end=ended.append, **times)


def wait_until(condition: list[LatentlineError], seconds: float = 20) -> None:
    end_s = time.monotonic() + seconds
    while not condition:
        assert time.monotonic() < end_s
        time.sleep(0.02)


GLOO = RuntimeError(
    "[/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:1"
)


def test_the_error_of_a_process_is_raised_on_the_machine_that_loses_the_connection(
    machines: list[Machines], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SEEN_S", 60.0)
    ended: list[LatentlineError] = []
    watches = [watch(each, ended, silence_s=60) for each in machines]
    error = StoreError("an entry is missing", where="cache/ab", fix="run the cache job")

    failing = threading.Thread(target=explained, args=(error, machines[1]))
    failing.start()
    failing.join(timeout=30)
    assert not failing.is_alive(), "the failed process waits although all have read its error"

    failure = explained(GLOO, machines[0])
    assert isinstance(failure, StoreError)
    assert failure.what.startswith("an entry is missing (on machine 1, ")
    assert (failure.where, failure.fix) == ("cache/ab", "run the cache job")
    for each in watches:
        each.stop()
    assert not ended


def test_a_lost_connection_without_an_error_says_where_to_look_and_how_to_resume(
    machines: list[Machines],
) -> None:
    failure = explained(GLOO, machines[0])
    assert isinstance(failure, LaunchError)
    assert "ended on another machine, or the connection to it was lost" in failure.what
    assert "Connection closed by peer" in failure.where
    assert "start the same commands again on all machines" in failure.fix


def test_an_error_of_this_process_is_not_taken_for_that_of_another(machines: list[Machines]) -> None:
    assert explained(ValueError("a bug"), machines[0]) is None
    failure = FailureBoard(machines[1]).failure()
    assert failure is not None
    assert "ValueError: a bug (on machine 0" in failure.what
    assert FailureBoard(machines[0]).failure(of_others=True) is None


def test_only_the_first_failure_counts(machines: list[Machines]) -> None:
    for rank, name in enumerate(("first", "second")):
        FailureBoard(machines[rank]).announce(LaunchError(name, where="", fix=""), wait_s=0)
    failure = FailureBoard(machines[1]).failure()
    assert failure is not None
    assert failure.what.startswith("first")


def test_a_machine_that_stays_silent_ends_the_others(machines: list[Machines]) -> None:
    ended: list[LatentlineError] = []
    silent = watch(machines[1], [], silence_s=60)
    watching = watch(machines[0], ended, silence_s=3, start_s=60)
    end_s = time.monotonic() + 3.5
    while time.monotonic() < end_s:
        assert not ended, "a machine is lost although it sends beats"
        time.sleep(0.05)

    silent.stop()
    wait_until(ended)
    watching.stop()
    assert ended[0].what == "machine 1 of 2 stopped responding"
    assert "--master 127.0.0.1" in ended[0].where


def test_a_machine_that_never_starts_ends_the_others_later(machines: list[Machines]) -> None:
    ended: list[LatentlineError] = []
    started_s = time.monotonic()
    watching = watch(machines[0], ended, silence_s=0.2, start_s=1.0)
    wait_until(ended)
    watching.stop()
    assert time.monotonic() - started_s > 0.9


def test_a_machine_that_has_finished_is_not_missed(machines: list[Machines]) -> None:
    ended: list[LatentlineError] = []
    finished = watch(machines[1], [], silence_s=60)
    watching = watch(machines[0], ended, silence_s=1.5, start_s=60)
    time.sleep(0.5)
    finished.leave()
    finished.stop()
    time.sleep(2.5)
    watching.stop()
    assert not ended


def test_a_machine_whose_store_has_gone_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_board, "_TIMEOUT", timedelta(seconds=1))
    ended: list[LatentlineError] = []
    nobody = Machines(2, 1, "127.0.0.1", 1)
    watching = watch(nobody, ended)
    wait_until(ended)
    watching.stop()
    assert ended[0].what == "machine 0 of 2 stopped responding"
