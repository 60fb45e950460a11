"""`python -m pipeline.models.convert.worker <job.json>`: convert the components of a single file."""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.processes.guard import end_now, watch_parent
from pipeline.processes.pipes import reporter


def main(job_file: Path) -> None:
    """Write the components of the job."""
    watch_parent()
    with reporter() as report:
        from pipeline.processes.worker.imports import quick_imports

        with quick_imports():
            from pipeline.models.worker.loading import keep_quiet

            keep_quiet()
            from pipeline.models.convert.job import read_job
            from pipeline.models.convert.worker.components import convert_components

        convert_components(read_job(job_file), report.progress)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    end_now(0)
