"""Main of an encoding process: `python -m pipeline.<stage>.worker <encoding.json>`.

Accelerate launches several of them and sets the rank; a single process is started directly.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from pipeline.processes.guard import watch_parent
from pipeline.processes.pipes import rank, reporter


def main(encoding_file: Path, run: Callable[..., None]) -> None:
    """Encode the entries of `encoding_file` that belong to this rank, and report progress to the parent.

    `run` is the stage's `run`, which imports torch when it is called.
    """
    watch_parent()
    with reporter() as report:
        # Imported here, so that a failure to import torch reaches the reporter.
        from pipeline.processes.worker.imports import quick_imports

        with quick_imports():
            from pipeline.models.worker.loading import import_base_classes
            from pipeline.processes.worker.devices import used_memory_text

            import_base_classes()
        report.lines.memory = used_memory_text
        run(encoding_file, report, rank=rank(), num_ranks=int(os.environ.get("WORLD_SIZE", "1")))
