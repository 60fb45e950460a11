"""`python -m pipeline.lora_files.worker <job.json>`: extract a LoRA from two models."""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.processes.guard import end_now, watch_parent
from pipeline.processes.pipes import reporter


def main(job_file: Path) -> None:
    """Write the files of the job, and the result next to it."""
    watch_parent()
    with reporter() as report:
        from pipeline.processes.worker.imports import quick_imports

        with quick_imports():
            from pipeline.models.worker.loading import keep_quiet

            keep_quiet()
            from pipeline.lora_files.extract import read_job
            from pipeline.lora_files.worker.extract import extract_lora

        extract_lora(read_job(job_file), job_file.parent, report.progress)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    end_now(0)
