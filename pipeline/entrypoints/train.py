"""`python -m pipeline.entrypoints.train <order.json>`: one process of a training run, under accelerate."""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.entrypoints.guard import end_now
from pipeline.entrypoints.pipes import reporter


def main(order_path: Path) -> None:
    """Train what the order says; ends with status 143 when asked to stop, leaving a checkpoint."""
    with reporter() as report:
        import torch

        from pipeline.families.quiet import keep_quiet
        from pipeline.launching import cpu_threads
        from pipeline.training.loop import train
        from pipeline.training.order import read_order
        from pipeline.training.stopping import STOPPED_STATUS, heard_signals

        torch.set_num_threads(cpu_threads())
        keep_quiet()
        with heard_signals() as stop:
            finished = train(read_order(order_path), report, stop)
        if not finished:
            raise SystemExit(STOPPED_STATUS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    end_now(0)
