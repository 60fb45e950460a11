"""A watch over the machines of a training, so that all of them end soon after one has ended.

An error of one process reaches the other machines in seconds. If a machine stays silent, for example without
power, the training ends on all other machines within two minutes. The machines exchange beats and errors
outside of the process group, in a store of keys that machine 0 hosts at the port where the machines met:

    beats/0: 17   beats/1: 16          one more every 2 s while the machine lives
    failures: 1                        processes that have failed
    failure: {"machine": 1, ...}       error of the first of them
    seen: 1                            machines that have read it
    done/0: 1                          the machine needs the other machines no longer
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistError, PrefixStore, Store, TCPStore

import pipeline.errors
from pipeline.errors import LatentlineError, LaunchError
from pipeline.processes.guard import end_now
from pipeline.processes.machines import Machines, machines_of_this_process
from pipeline.processes.pipes import write_error
from pipeline.storage.os_errors import as_file_access_error

BEAT_S = 2.0
"""Seconds between two beats of a machine."""

SILENCE_S = 120.0
"""Seconds without a beat after which a machine counts as lost."""

START_S = 300.0
"""Seconds that a machine has until its first beat; its processes import torch and connect before."""

FAILURE_GRACE_S = 30.0
"""Seconds that a process has to end by itself after another machine has failed."""

SEEN_S = 3 * BEAT_S
"""Longest wait of a failed process until the other machines have read its error, and of a process that lost a
connection until it finds the error of another machine."""

STOP_S = 10.0
"""Longest wait for the threads of a watch at its end."""

POLL_S = 0.1

_TIMEOUT = timedelta(seconds=5)
_PREFIX = "latentline"
_RESUME = "start the same commands again on all machines: training resumes from its last checkpoint"

Result = TypeVar("Result")


@contextmanager
def machines_watched() -> Generator[None]:
    """Watch the other machines of this process's training during the body; on a single machine, do nothing.

    Raises:
        LatentlineError: Another machine has failed, or the connection to it was lost.
    """
    machines = machines_of_this_process()
    if machines.number == 1:
        yield
        return

    # One process of a machine beats for all of them, because accelerate's launcher ends them together.
    watch = MachineWatch(machines) if os.environ["LOCAL_RANK"] == "0" else None
    try:
        yield
    except Exception as err:
        failure = explained(err, machines)
        if failure is None:
            raise
        raise failure from err
    else:
        if watch is not None:
            watch.leave()
    finally:
        if watch is not None:
            watch.stop()


def explained(err: Exception, machines: Machines, *, wait_s: float = SEEN_S) -> LatentlineError | None:
    """Return the failure of another process if it caused an error of this one.

    Any other error is announced to the other machines within `wait_s`, and the result is None.
    """
    store = MachineStore(machines)
    if not _is_lost_connection(err):
        own = err if isinstance(err, LatentlineError) else as_file_access_error(err)
        own = own or LaunchError(
            f"{type(err).__name__}: {_first_line(err)}", where=_name(machines), fix=_RESUME
        )
        with suppress(RuntimeError):
            store.announce(own, wait_s)
        return None

    end_s = time.monotonic() + wait_s
    with suppress(RuntimeError):  # machine 0, which hosts the store, may be the one that has ended
        while time.monotonic() < end_s:
            if (failure := store.failure()) is not None:
                return failure
            time.sleep(POLL_S)
    return LaunchError(
        "the training has ended on another machine, or the connection to it was lost",
        where=f"{_name(machines)}: {_first_line(err)}",
        fix=f"look for the cause in the output of the other machines; {_RESUME}",
    )


class ConnectionLostError(RuntimeError):
    """The store of machine 0 was reached before, and no longer can be."""


class MachineStore:
    """A connection to the keys; one thread at a time uses it.

    Requests raise RuntimeError if the store of machine 0 cannot be reached.
    """

    def __init__(self, machines: Machines, *, timeout: timedelta = _TIMEOUT) -> None:
        """Prepare the connection, which the first request opens within `timeout`."""
        self._machines, self._timeout = machines, timeout
        self._store: Store | None = None
        self._is_lost = False

    def beat(self) -> dict[int, float]:
        """Count a beat of this machine; return the beats of all other machines, infinite after their end."""
        self._request(lambda store: store.add(f"beats/{self._machines.rank}", 1))
        return {rank: self._beats(rank) for rank in other_ranks(self._machines)}

    def failure(self, *, of_others: bool = False) -> LatentlineError | None:
        """Return the first failure of a process, or None; with `of_others`, of another machine only."""
        if not self._request(lambda store: store.check(["failure"])):
            return None
        parts: dict[str, Any] = json.loads(self._request(lambda store: store.get("failure")))
        is_own = parts["machine"] == self._machines.rank
        if is_own and of_others:
            return None
        kind = getattr(pipeline.errors, parts["kind"], LatentlineError)
        place = "" if is_own else f" (on machine {parts['machine']}, {parts['host']})"
        return kind(parts["what"] + place, where=parts["where"], fix=parts["fix"])

    def confirm(self) -> None:
        """Announce that this machine has read the failure."""
        self._request(lambda store: store.add("seen", 1))

    def announce(self, err: LatentlineError, wait_s: float) -> None:
        """Announce a failure of this process, and wait until all other machines have read it."""
        # Only the first failure counts: later ones are often its consequences.
        if self._request(lambda store: store.add("failures", 1)) > 1:
            return
        parts = {"machine": self._machines.rank, "host": platform.node(), "kind": type(err).__name__}
        text = json.dumps({**parts, "what": err.what, "where": err.where, "fix": err.fix})
        self._request(lambda store: store.set("failure", text))

        end_s = time.monotonic() + wait_s

        # The store ends with the processes of machine 0, and the error with it.
        while self._num_seen() < self._machines.number - 1 and time.monotonic() < end_s:
            time.sleep(POLL_S)

    def leave(self) -> None:
        """Announce that this machine ends and needs the other machines no longer."""
        self._request(lambda store: store.add(f"done/{self._machines.rank}", 1))

    def _beats(self, rank: int) -> float:
        if self._request(lambda store: store.add(f"done/{rank}", 0)):
            return float("inf")
        return self._request(lambda store: store.add(f"beats/{rank}", 0))

    def _num_seen(self) -> int:
        return self._request(lambda store: store.add("seen", 0))

    def _request(self, send: Callable[[Store], Result]) -> Result:
        # The store ends with the training, so a lost connection is not opened again.
        if self._is_lost:
            raise ConnectionLostError
        if self._store is None:
            self._store = PrefixStore(_PREFIX, self._connect())
        try:
            return send(self._store)
        except RuntimeError:
            self._is_lost = True
            raise

    def _connect(self) -> Store:
        host, port = self._machines.host, self._machines.port
        return TCPStore(host, port, is_master=False, timeout=self._timeout, wait_for_workers=False)


class MachineStates:
    """The last beat of each other machine, and their first failure; times come from the caller's clock."""

    def __init__(self, machines: Machines, now_s: float) -> None:
        """Expect the first beat of each other machine within `START_S`."""
        self._machines = machines
        self._beats: dict[int, float] = dict.fromkeys(other_ranks(machines), 0.0)
        self._heard_s = dict.fromkeys(self._beats, now_s + START_S - SILENCE_S)
        self._failure: LatentlineError | None = None
        self._failed_s = float("inf")

    @property
    def has_failed(self) -> bool:
        """Whether another machine has failed."""
        return self._failure is not None

    def hear(self, beats: Mapping[int, float], now_s: float) -> None:
        """Record the result of `MachineStore.beat`."""
        for rank, number in beats.items():
            if number != self._beats[rank]:
                self._heard_s[rank] = now_s if number < float("inf") else number
            self._beats[rank] = number

    def fail(self, failure: LatentlineError, now_s: float) -> None:
        """Record the failure of another machine."""
        # The watching thread reads the time first, so that it never sees a failure without its time.
        self._failed_s = now_s
        self._failure = failure

    def error(self, now_s: float) -> LatentlineError | None:
        """Return the error that ends this machine now, or None while it may continue."""
        if self._failure is not None and now_s - self._failed_s > FAILURE_GRACE_S:
            return self._failure
        lost = [rank for rank, heard_s in self._heard_s.items() if now_s - heard_s > SILENCE_S]
        return (self._failure or self._silence_error(lost)) if lost else None

    def _silence_error(self, lost: Sequence[int]) -> LaunchError:
        names = ", ".join(f"machine {rank}" for rank in lost)
        return LaunchError(
            f"{names} of {self._machines.number} stopped responding",
            where=f"{_name(self._machines)}, --master {self._machines.address}",
            fix=f"check that {names} is running and can be reached; {_RESUME}",
        )


def _end(err: LatentlineError) -> None:
    # Not by an exception, because the main thread may wait for another machine forever.
    write_error(err)
    end_now(1)


class MachineWatch:
    """Sends the beats of this machine, and ends the process if another machine has failed or stays silent."""

    def __init__(
        self,
        machines: Machines,
        *,
        store: MachineStore | None = None,
        clock: Callable[[], float] = time.monotonic,
        beat_s: float = BEAT_S,
        end: Callable[[LatentlineError], object] = _end,
    ) -> None:
        """Start to watch; `end` receives the error that ends this process."""
        self._machines, self._clock, self._beat_s, self._end = machines, clock, beat_s, end
        self._store = MachineStore(machines) if store is None else store
        self._states = MachineStates(machines, clock())
        self._stopped = threading.Event()

        # Requests to a machine without power block for many minutes, so another thread measures the silence.
        self._threads = [
            threading.Thread(target=work, name="machine-watch", daemon=True)
            for work in (self._exchange_beats, self._end_with_others)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop watching and sending beats."""
        self._stopped.set()
        # Python must not end while a thread is inside of torch. A request to a lost machine may take longer.
        for thread in self._threads:
            thread.join(STOP_S)

    def leave(self) -> None:
        """Announce that this machine ends after its work is done, so that it is not taken for a lost one."""
        # Not through the connection of the thread that sends beats, which may be in use.
        with suppress(RuntimeError):
            MachineStore(self._machines).leave()

    def _exchange_beats(self) -> None:
        while not self._stopped.wait(self._beat_s):
            with suppress(RuntimeError):  # a machine that cannot be reached is silent
                self._states.hear(self._store.beat(), self._clock())
                failure = None if self._states.has_failed else self._store.failure(of_others=True)
                if failure is not None:
                    self._states.fail(failure, self._clock())
                    self._store.confirm()

    def _end_with_others(self) -> None:
        while not self._stopped.wait(self._beat_s):
            if (error := self._states.error(self._clock())) is not None:
                self._end(error)


def other_ranks(machines: Machines) -> list[int]:
    """Return the ranks of all machines except this one."""
    return [rank for rank in range(machines.number) if rank != machines.rank]


def _is_lost_connection(err: Exception) -> bool:
    """Return whether torch reports the end of a process on another machine, or of the connection to it."""
    # NCCL and the store have their own class of errors; gloo raises RuntimeError with its file and line.
    return isinstance(err, DistError) or (isinstance(err, RuntimeError) and "gloo" in str(err))


def _name(machines: Machines) -> str:
    return f"machine {machines.rank} of {machines.number}"


def _first_line(err: Exception) -> str:
    return str(err).strip().partition("\n")[0]
