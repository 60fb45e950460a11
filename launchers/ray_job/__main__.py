"""Entry point of the job: `python -m launchers.ray_job <RayWork as JSON>`; tested with the driver."""

from __future__ import annotations

import sys

from launchers.ray_job.driver import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
