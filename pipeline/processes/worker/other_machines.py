"""A watch over the other machines of a training, so that all of them end soon after one has ended.

An error of one process reaches the others in seconds. If a machine stays silent, for example without power,
the training ends on all other machines within two minutes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress

from torch.distributed import DistError

from pipeline.errors import LatentlineError, LaunchError
from pipeline.processes.guard import end_now
from pipeline.processes.machines import Machines, machines_of_this_process
from pipeline.processes.pipes import write_error
from pipeline.processes.worker.failure_board import POLL_S, FailureBoard
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
"""Longest wait of a failed process for the other machines to read its error, and of others for an error."""

STOP_S = 10.0
"""Longest wait for the threads of a watch at its end."""

_RESUME = "start the same commands again on all machines: training resumes from its last checkpoint"


@contextmanager
def other_machines_watched() -> Generator[None]:
    """Watch the other machines of this process's training during the body; without others, do nothing.

    Raises:
        LatentlineError: Another machine has failed, or the connection to it was lost.
    """
    machines = machines_of_this_process()
    if machines.number == 1:
        yield
        return

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


def explained(err: Exception, machines: Machines) -> LatentlineError | None:
    """Return the failure of another process if it caused an error of this one.

    Any other error is announced to the other machines, and the result is None.
    """
    board = FailureBoard(machines)
    if not _is_lost_connection(err):
        own = err if isinstance(err, LatentlineError) else as_file_access_error(err)
        own = own or LaunchError(
            f"{type(err).__name__}: {_first_line(err)}", where=_name(machines), fix=_RESUME
        )
        with suppress(RuntimeError):
            board.announce(own, SEEN_S)
        return None

    end_s = time.monotonic() + SEEN_S
    with suppress(RuntimeError):  # machine 0, which hosts the board, may be the one that has ended
        while time.monotonic() < end_s:
            if (failure := board.failure()) is not None:
                return failure
            time.sleep(POLL_S)
    return LaunchError(
        "the training has ended on another machine, or the connection to it was lost",
        where=f"{_name(machines)}: {_first_line(err)}",
        fix=f"look for the cause in the output of the other machines; {_RESUME}",
    )


def _end(err: LatentlineError) -> None:
    """End this process, which may wait for another machine forever, with an error."""
    write_error(err)
    end_now(1)


class MachineWatch:
    """Sends the beats of this machine, and ends the process if another machine has failed or stays silent."""

    def __init__(
        self,
        machines: Machines,
        *,
        beat_s: float = BEAT_S,
        silence_s: float = SILENCE_S,
        start_s: float = START_S,
        end: Callable[[LatentlineError], object] = _end,
    ) -> None:
        """Start to watch.

        Args:
            machines: Machines of the training.
            beat_s: Seconds between two beats.
            silence_s: Seconds without a beat after which a machine counts as lost.
            start_s: Seconds that a machine has until its first beat.
            end: Receives the error that ends this process.
        """
        self._machines, self._beat_s, self._silence_s, self._end = machines, beat_s, silence_s, end
        others = [rank for rank in range(machines.number) if rank != machines.rank]
        self._beats: dict[int, float] = dict.fromkeys(others, 0.0)
        self._heard_s = dict.fromkeys(others, time.monotonic() + start_s - silence_s)
        self._failure: LatentlineError | None = None
        self._failed_s = float("inf")
        self._stopped = threading.Event()

        # Requests to a machine without power block for many minutes, so another thread measures the silence.
        self._threads = [
            threading.Thread(target=work, name="other-machines", daemon=True)
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
        """Announce that this machine ends after its work is done, so that others do not miss it."""
        with suppress(RuntimeError):
            FailureBoard(self._machines).leave()

    def _exchange_beats(self) -> None:
        board = FailureBoard(self._machines)
        while not self._stopped.wait(self._beat_s):
            with suppress(RuntimeError):  # a machine that cannot be reached is silent
                self._hear(board.beat())
                if self._failure is None and (failure := board.failure(of_others=True)) is not None:
                    self._failed_s = time.monotonic()
                    self._failure = failure
                    board.confirm()

    def _hear(self, beats: dict[int, float]) -> None:
        for rank, number in beats.items():
            if number != self._beats[rank]:
                self._heard_s[rank] = time.monotonic() if number < float("inf") else number
            self._beats[rank] = number

    def _end_with_others(self) -> None:
        while not self._stopped.wait(self._beat_s):
            now_s = time.monotonic()
            lost = [rank for rank, heard_s in self._heard_s.items() if now_s - heard_s > self._silence_s]
            if self._failure is not None and now_s - self._failed_s > FAILURE_GRACE_S:
                self._end(self._failure)
            elif lost:
                self._end(self._failure or self._silence_error(lost))

    def _silence_error(self, lost: Sequence[int]) -> LaunchError:
        names = ", ".join(f"machine {rank}" for rank in lost)
        return LaunchError(
            f"{names} of {self._machines.number} stopped responding",
            where=f"{_name(self._machines)}, --master {self._machines.address}",
            fix=f"check that {names} is running and can be reached; {_RESUME}",
        )


def _is_lost_connection(err: Exception) -> bool:
    """Return whether torch reports the end of a process on another machine, or of the connection to it."""
    # NCCL and the store have their own class of errors; gloo raises RuntimeError with its file and line.
    return isinstance(err, DistError) or (isinstance(err, RuntimeError) and "gloo" in str(err))


def _name(machines: Machines) -> str:
    return f"machine {machines.rank} of {machines.number}"


def _first_line(err: Exception) -> str:
    return str(err).strip().partition("\n")[0]
