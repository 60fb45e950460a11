"""Entry point of the job: `python -m pipeline.processes.ray_job <RayWork as JSON>`."""

from __future__ import annotations

import sys

from pipeline.processes.ray_job.driver import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
