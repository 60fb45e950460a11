"""`python -m pipeline.entrypoints.convert <order.json>`: where a single file becomes a folder."""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.entrypoints.guard import end_now, watch_parent
from pipeline.entrypoints.pipes import reporter


def main(order_file: Path) -> None:
    """Write the components that the order names."""
    watch_parent()
    with reporter() as report:
        from pipeline.families.quiet import keep_quiet
        from pipeline.single_file.order import read_order
        from pipeline.single_file.parts import convert_parts

        keep_quiet()
        convert_parts(read_order(order_file), report.progress)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    end_now(0)
