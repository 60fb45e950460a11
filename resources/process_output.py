"""Output of launched processes in files, and clean-up that a second signal cannot interrupt."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager

from pipeline.escaping import printable_lines, without_secrets
from pipeline.processes.launch import OutputFile


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


class ForwardedOutput(OutputFile):
    """The output of launched processes, which the log of a step shows."""

    def forward(self, *, final: bool = False) -> None:
        """Copy new output to standard error: complete lines only, unless `final`; see `write_output`."""
        if text := self.new_text(final=final):
            write_output(text)


def write_output(text: str) -> None:
    """Write output of processes to standard error, which Dagster captures, with escapes and without secrets.

    A traceback quotes names and captions as they are.
    """
    # Progress bars of libraries return to the start of the line.
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    sys.stderr.write(printable_lines(without_secrets(lines)))
    sys.stderr.flush()
