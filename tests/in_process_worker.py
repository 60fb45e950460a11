"""Run the worker of either cache stage in the calling process."""

from importlib import import_module
from pathlib import Path

from pipeline.encoding.fill import WORKERS
from pipeline.encoding.jobs import read_order
from pipeline.encoding.progress import Report


def run(order_file: Path, report: Report, *, rank: int, num_ranks: int) -> None:
    """Encode an order with the worker of its kind."""
    worker = import_module(f"{WORKERS[read_order(order_file).kind]}.run")
    worker.run(order_file, report, rank=rank, num_ranks=num_ranks)
