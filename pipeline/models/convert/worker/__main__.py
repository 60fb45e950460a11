"""`python -m pipeline.models.convert.worker <order.json>`: where a single file becomes a folder."""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.processes.guard import end_now, watch_parent
from pipeline.processes.pipes import reporter


def main(order_file: Path) -> None:
    """Write the components that the order names."""
    watch_parent()
    with reporter() as report:
        from pipeline.models.convert.job import read_order
        from pipeline.models.convert.worker.parts import convert_parts
        from pipeline.models.worker.loading import keep_quiet

        keep_quiet()
        convert_parts(read_order(order_file), report.progress)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    end_now(0)
