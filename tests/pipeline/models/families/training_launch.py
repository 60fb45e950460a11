"""A launch that runs encoders and training in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.processes.launch import Meanwhile
from pipeline.trained_lora.job import read_job
from pipeline.trained_lora.worker.loop import train
from pipeline.trained_lora.worker.stop_request import StopRequest


class InProcessLaunch:
    """Run every kind of worker in this process."""

    def __init__(self, encode: Any) -> None:
        self.encode = encode
        self.orders: list[Path] = []

    def __call__(self, module: str, job: Path, meanwhile: Meanwhile | None = None) -> None:
        from pipeline.encoding.fill import WORKERS

        if module in WORKERS.values():
            self.encode(module, job, meanwhile)
        else:
            self.orders.append(job)
            assert train(read_job(job), self, StopRequest())

    def info(self, text: str) -> None: ...
    def phase(self, text: str) -> None: ...

    def progress(self, done: int, total: int, text: str, **details: str) -> None: ...
