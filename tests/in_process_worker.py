"""Run encoders and training in the calling process, which saves the start of a process that imports torch."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cache.pack_copies import CopySettings
from pipeline.encoding.jobs import read_encoding
from pipeline.encoding.progress import Report
from pipeline.encoding.workers import WORKERS
from pipeline.errors import LaunchError
from pipeline.processes.launch import TRAINING_MODULE, Meanwhile

if TYPE_CHECKING:
    from pipeline.trained_lora.worker.stop_request import StopRequest


def run(encoding_file: Path, report: Report, *, rank: int, num_ranks: int) -> None:
    """Encode an encoding with the worker of its kind.

    The worker sets torch's number of threads for its process. It is reset here, because later tests of this
    process compare floating-point results bit for bit.
    """
    import torch

    worker = import_module(f"{WORKERS[read_encoding(encoding_file).kind]}.__main__")
    threads = torch.get_num_threads()
    try:
        worker.run(encoding_file, report, rank=rank, num_ranks=num_ranks)
    finally:
        torch.set_num_threads(threads)


class InProcessLaunch:
    """A `Launch` of encoders and training in this process.

    Attributes:
        modules: Entry modules of all calls.
        job_files: File with the job of each call: an encoding or a training.
        lines: Lines that the workers have reported.
        stop_after: Number of steps after which a training is stopped; None for all.
        copies: Local copies of packs for a training; None for the default.
    """

    def __init__(self, stop_after: int | None = None) -> None:
        self.modules: list[str] = []
        self.job_files: list[Path] = []
        self.lines: list[str] = []
        self.stop_after = stop_after
        self.copies: CopySettings | None = None
        self._stop: StopRequest | None = None

    def __call__(self, module: str, job_file: Path, meanwhile: Meanwhile | None = None) -> None:
        if meanwhile is not None:
            meanwhile()
        self.modules.append(module)
        self.job_files.append(job_file)
        if module == TRAINING_MODULE:
            self._train(job_file)
        else:
            assert module in WORKERS.values()
            run(job_file, self, rank=0, num_ranks=1)

    def _train(self, job_file: Path) -> None:
        from pipeline.trained_lora.job import read_job
        from pipeline.trained_lora.worker.loop import train
        from pipeline.trained_lora.worker.stop_request import StopRequest

        self._stop = StopRequest()
        if not train(read_job(job_file, copies=self.copies), self, self._stop):
            raise LaunchError("stopped", where=TRAINING_MODULE, fix="start again")

    def info(self, text: str) -> None:
        self.lines.append(text)

    def phase(self, text: str) -> None: ...

    def progress(self, done: int, total: int, text: str, **details: str) -> None:
        self.lines.append(f"{done}/{total} {text}")
        # Encoders cannot be stopped.
        if self._stop is not None and self.stop_after is not None and done >= self.stop_after:
            self._stop.requested = True


def forget_precision() -> None:
    """Reset Accelerate's state, which otherwise fixes the precision for the lifetime of the process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
