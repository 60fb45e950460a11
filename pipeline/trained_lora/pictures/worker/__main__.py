"""`python -m pipeline.trained_lora.pictures.worker <order.json>`: draw the pictures of a job."""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.processes.guard import end_now, watch_parent
from pipeline.processes.pipes import reporter


def main(order_path: Path) -> None:
    """Draw all pictures; report progress to the parent."""
    watch_parent()
    with reporter() as report:
        # Imported here, so that a failure to import torch reaches the reporter.
        from pipeline.processes.worker.imports import quick_imports

        with quick_imports():
            import torch

            from pipeline.models.worker.loading import import_base_classes

            import_base_classes()
            from pipeline.processes.launch import cpu_threads
            from pipeline.processes.worker.devices import used_memory_text
            from pipeline.trained_lora.pictures.job import read_drawing_job
            from pipeline.trained_lora.pictures.worker.artist import draw_pictures

        report.lines.memory = used_memory_text
        torch.set_num_threads(cpu_threads())
        draw_pictures(read_drawing_job(order_path), report, scratch=order_path.parent)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    end_now(0)
