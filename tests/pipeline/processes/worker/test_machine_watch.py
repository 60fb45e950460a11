"""The watch over the machines of a training: their errors arrive, and their silence is noticed."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Generator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from pipeline.errors import LatentlineError, LaunchError, StoreError
from pipeline.processes.machines import Machines
from pipeline.processes.worker.machine_watch import (
    FAILURE_GRACE_S,
    SILENCE_S,
    START_S,
    MachineStates,
    MachineStore,
    MachineWatch,
    explained,
)

BEAT_S = 0.02

TWO = Machines(2, 0, "node1", 29500)
ERROR = StoreError("an entry is missing", where="cache/ab", fix="run the cache job")
GLOO = RuntimeError(
    "[/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:1"
)


@pytest.fixture
def machines() -> Generator[list[Machines]]:
    """Two machines whose meeting point is a store of this process."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    yield [Machines(2, rank, "127.0.0.1", store.port) for rank in (0, 1)]
    del store


def test_a_machine_that_stays_silent_is_an_error_with_its_name() -> None:
    states = MachineStates(TWO, now_s=0)
    states.hear({1: 1}, now_s=10)
    states.hear({1: 2}, now_s=12)
    states.hear({1: 2}, now_s=100)  # no new beat
    assert states.error(now_s=12 + SILENCE_S) is None
    error = states.error(now_s=13 + SILENCE_S)
    assert error is not None
    assert error.what == "machine 1 of 2 stopped responding"
    assert "--master node1:29500" in error.where


def test_a_machine_has_more_time_until_its_first_beat() -> None:
    states = MachineStates(TWO, now_s=1000)
    assert states.error(now_s=1000 + START_S) is None
    assert states.error(now_s=1001 + START_S) is not None


def test_a_machine_that_has_finished_is_not_missed() -> None:
    states = MachineStates(TWO, now_s=0)
    states.hear({1: 1}, now_s=1)
    states.hear({1: float("inf")}, now_s=2)
    assert states.error(now_s=1e9) is None


def test_a_machine_ends_some_time_after_the_failure_of_another_one_or_at_once_if_that_is_silent() -> None:
    states = MachineStates(TWO, now_s=0)
    states.hear({1: 1}, now_s=0)
    states.fail(ERROR, now_s=10)
    assert states.error(now_s=10 + FAILURE_GRACE_S) is None
    assert states.error(now_s=11 + FAILURE_GRACE_S) is ERROR

    states = MachineStates(TWO, now_s=0)
    states.hear({1: 1}, now_s=0)
    states.fail(ERROR, now_s=SILENCE_S)
    assert states.error(now_s=SILENCE_S + 1) is ERROR


def wait_for(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_machines_send_beats_until_they_leave(machines: list[Machines]) -> None:
    other = MachineStore(machines[0])
    watching = MachineWatch(machines[1], beat_s=BEAT_S, end=pytest.fail)
    wait_for(lambda: other.beat()[1] > 3)
    watching.leave()
    watching.stop()
    assert other.beat() == {1: float("inf")}


def test_a_process_ends_after_a_silence_by_its_clock_although_the_store_has_gone() -> None:
    nobody = Machines(2, 1, "127.0.0.1", 1)
    ended: list[LatentlineError] = []
    times = itertools.chain([0.0], itertools.repeat(START_S + 1))
    store = MachineStore(nobody, timeout=timedelta(milliseconds=100))
    watching = MachineWatch(nobody, store=store, clock=lambda: next(times), beat_s=BEAT_S, end=ended.append)
    wait_for(lambda: ended)
    watching.stop()
    assert ended[0].what == "machine 0 of 2 stopped responding"


def test_the_error_of_a_process_is_raised_on_the_machine_that_loses_the_connection(
    machines: list[Machines],
) -> None:
    watches = [MachineWatch(each, beat_s=BEAT_S, end=pytest.fail) for each in machines]
    failing = threading.Thread(target=explained, args=(ERROR, machines[1]), kwargs={"wait_s": 60.0})
    failing.start()
    failing.join(timeout=30)
    assert not failing.is_alive(), "the failed process waits although all have read its error"

    failure = explained(GLOO, machines[0])
    assert isinstance(failure, StoreError)
    assert failure.what.startswith("an entry is missing (on machine 1, ")
    assert (failure.where, failure.fix) == ("cache/ab", "run the cache job")
    for each in watches:
        each.stop()


def test_a_lost_connection_without_an_error_says_where_to_look_and_how_to_resume(
    machines: list[Machines],
) -> None:
    failure = explained(GLOO, machines[0], wait_s=0.1)
    assert isinstance(failure, LaunchError)
    assert "ended on another machine, or the connection to it was lost" in failure.what
    assert "Connection closed by peer" in failure.where
    assert "start the same commands again on all machines" in failure.fix


def test_an_error_of_this_process_is_not_taken_for_that_of_another(machines: list[Machines]) -> None:
    assert explained(ValueError("a bug"), machines[0], wait_s=0.1) is None
    failure = MachineStore(machines[1]).failure()
    assert failure is not None
    assert "ValueError: a bug (on machine 0" in failure.what
    assert MachineStore(machines[0]).failure(of_others=True) is None


def test_only_the_first_failure_counts(machines: list[Machines]) -> None:
    for rank, name in enumerate(("first", "second")):
        MachineStore(machines[rank]).announce(LaunchError(name, where="", fix=""), wait_s=0)
    failure = MachineStore(machines[1]).failure()
    assert failure is not None
    assert failure.what.startswith("first")
