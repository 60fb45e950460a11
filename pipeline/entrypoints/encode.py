"""`python -m pipeline.entrypoints.encode <order.json>`: one process of a cache stage, under accelerate."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pipeline.entrypoints.pipes import rank, reporter


def main(order_file: Path) -> None:
    """Make this process's share of the entries that the order asks for."""
    with reporter() as report:
        from pipeline.encode.worker import run

        run(order_file, report, rank=rank(), num_ranks=int(os.environ.get("WORLD_SIZE", "1")))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
