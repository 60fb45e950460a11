"""`python -m pipeline.memory.worker <job.json>`: forecast the memory and the time of a recipe."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pipeline.processes.guard import end_now, watch_parent
from pipeline.processes.pipes import reporter


def main(job_file: Path) -> None:
    """Write the forecast next to the job."""
    watch_parent()
    # The text encoder of Kolors compiles functions that do not accept the meta device.
    os.environ["PYTORCH_JIT"] = "0"
    with reporter() as report:
        from pipeline.processes.worker.imports import quick_imports

        with quick_imports():
            from pipeline.models.worker.loading import import_base_classes

            import_base_classes()
            from pipeline.memory.job import read_job, write_result
            from pipeline.memory.worker.stages import forecast_stages

        write_result(forecast_stages(read_job(job_file), report.phase), job_file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    end_now(0)
