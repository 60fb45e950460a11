"""Requests to stop a training, by signal or by a file."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from pipeline.trained_lora.worker.stop_request import stop_on_signals


def test_a_signal_or_a_file_requests_a_stop(tmp_path: Path) -> None:
    file = tmp_path / "stop_request"
    with stop_on_signals(file) as stop:
        assert not stop.poll()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.poll()

    with stop_on_signals(file) as stop:
        file.touch()
        assert stop.poll()
        file.unlink()
        assert stop.poll(), "a request is not withdrawn"
