"""Output of launched processes in files, and clean-up that a second signal cannot interrupt."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@contextmanager
def uninterrupted() -> Generator[None]:
    """Defer SIGINT and SIGTERM until the end of the body; only the main thread handles them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    # The mask also protects commands that the body starts, because they inherit it. It does not suffice: if
    # another thread receives a signal, Python still calls the handler in the main thread.
    numbers, received = (signal.SIGINT, signal.SIGTERM), dict[int, None]()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        for number in numbers:
            signal.signal(number, lambda number, _frame: received.update({number: None}))
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in received:
            signal.raise_signal(number)


@dataclass
class ForwardedOutput:
    """The output of launched processes, in a file: a pipe would break when the step is killed."""

    file: Path
    _forwarded_bytes: int = 0

    def forward(self, *, final: bool = False) -> None:
        """Copy new output to standard error, which Dagster captures: complete lines only, unless `final`."""
        if not self.file.exists():
            return
        with self.file.open("rb") as file:
            file.seek(self._forwarded_bytes)
            new = file.read()
        new = new if final else new[: new.rfind(b"\n") + 1]
        self._forwarded_bytes += len(new)
        if new:
            sys.stderr.write(new.decode("utf-8", errors="replace"))
            sys.stderr.flush()

    def lines(self) -> list[str]:
        """Return all lines; none if the file does not exist."""
        if not self.file.exists():
            return []
        return self.file.read_text(encoding="utf-8", errors="replace").splitlines()
