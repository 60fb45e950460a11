"""What the machines of a training tell each other outside of the process group: beats, and the first failure.

Machine 0 hosts a store of keys, at the port where the machines met:

    beats/0: 17   beats/1: 16          one more every 2 s while the machine lives
    failures: 1                        processes that have failed
    failure: {"machine": 1, ...}       error of the first of them
    seen: 1                            machines that have read it
    done/0: 1                          the machine needs the others no longer
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store, TCPStore

import pipeline.errors
from pipeline.errors import LatentlineError
from pipeline.processes.machines import Machines

POLL_S = 0.1

_TIMEOUT = timedelta(seconds=5)
_PREFIX = "latentline"

Result = TypeVar("Result")


class ConnectionLostError(RuntimeError):
    """The store of machine 0 was reached before, and no longer can be."""


class FailureBoard:
    """A connection to the keys; one thread at a time uses it.

    Requests raise RuntimeError if the store of machine 0 cannot be reached. After the connection was lost,
    all of them do so, because the store ends with the training.
    """

    def __init__(self, machines: Machines) -> None:
        """Prepare the connection, which the first request opens."""
        self._machines = machines
        self._store: Store | None = None
        self._is_lost = False

    def beat(self) -> dict[int, float]:
        """Count a beat of this machine; return the beats of all others, infinite for those that are done."""
        self._request(lambda store: store.add(f"beats/{self._machines.rank}", 1))
        return {rank: self._beats(rank) for rank in self._other_ranks()}

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
        """Count this machine among those that have read the failure."""
        self._request(lambda store: store.add("seen", 1))

    def announce(self, err: LatentlineError, wait_s: float) -> None:
        """Announce a failure of this process, and wait until all other machines have read it.

        Nothing happens if another process has failed before.
        """
        if self._request(lambda store: store.add("failures", 1)) > 1:
            return
        parts = {"machine": self._machines.rank, "host": platform.node(), "kind": type(err).__name__}
        text = json.dumps({**parts, "what": err.what, "where": err.where, "fix": err.fix})
        self._request(lambda store: store.set("failure", text))

        end_s = time.monotonic() + wait_s
        while self._num_seen() < self._machines.number - 1 and time.monotonic() < end_s:
            time.sleep(POLL_S)

    def leave(self) -> None:
        """Announce that this machine ends and needs the others no longer."""
        self._request(lambda store: store.add(f"done/{self._machines.rank}", 1))

    def _beats(self, rank: int) -> float:
        if self._request(lambda store: store.add(f"done/{rank}", 0)):
            return float("inf")
        return self._request(lambda store: store.add(f"beats/{rank}", 0))

    def _num_seen(self) -> int:
        return self._request(lambda store: store.add("seen", 0))

    def _other_ranks(self) -> list[int]:
        return [rank for rank in range(self._machines.number) if rank != self._machines.rank]

    def _request(self, send: Callable[[Store], Result]) -> Result:
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
        return TCPStore(host, port, is_master=False, timeout=_TIMEOUT, wait_for_workers=False)
