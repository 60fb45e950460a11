"""Clean-up that signals cannot interrupt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from resources.process_output import ForwardedOutput, uninterrupted

STATUS_AFTER_SIGTERM = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"


def clean_up(number: signal.Signals, done: list[str]) -> None:
    with uninterrupted():
        os.kill(os.getpid(), number)
        time.sleep(0.2)
        done.append("clean-up")


@pytest.mark.parametrize("has_thread", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_R12_a_signal_waits_for_the_end_of_the_clean_up(number: signal.Signals, has_thread: bool) -> None:
    """The system delivers a signal that the main thread blocks to any other thread."""
    done: list[str] = []
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    if has_thread:
        thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            clean_up(number, done)
        assert done == ["clean-up"]
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, former)
        ended.set()


def test_R12_a_command_that_the_clean_up_starts_is_not_stopped_either() -> None:
    with uninterrupted():
        completed = subprocess.run([sys.executable, "-c", STATUS_AFTER_SIGTERM], check=False)
    assert completed.returncode == 0


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ("ValueError: \x1b]0;owned\x07 \u202egnp\n", "ValueError: \\x1b]0;owned\\x07 \\u202egnp\n"),
        ("10%\r20%\r\n", "10%\n20%\n"),
        ("\tno http://me:pass@host/x?sig=1\n", "\tno http://***@host/x?***\n"),
        ("a\x9b2Jb\x85c\x7f\n", "a\\x9b2Jb\\x85c\\x7f\n"),
    ],
)
def test_output_of_processes_is_forwarded_with_escapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str, shown: str
) -> None:
    file = tmp_path / "output.txt"
    file.write_bytes(output.encode())
    ForwardedOutput(file).forward()
    assert capsys.readouterr().err == shown
