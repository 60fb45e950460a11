"""`python -m pipeline.entrypoints.encode <order.json>`: one process of a cache stage.

A launch of several starts it under accelerate, which tells each its rank; one alone is started as it is.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pipeline.entrypoints.guard import end_now, watch_parent
from pipeline.entrypoints.pipes import rank, reporter


def main(order_file: Path) -> None:
    """Make this process's share of the entries that the order asks for."""
    watch_parent()
    with reporter() as report:
        from pipeline.encode.order import read_order
        from pipeline.families.lean import import_autoencoders, import_text_encoders

        if read_order(order_file).kind == "latents":
            import_autoencoders()
        else:
            import_text_encoders()
        from pipeline.encode.worker import run

        run(order_file, report, rank=rank(), num_ranks=int(os.environ.get("WORLD_SIZE", "1")))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    end_now(0)
