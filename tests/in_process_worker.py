"""Run the worker of either cache stage in the calling process."""

from importlib import import_module
from pathlib import Path

from pipeline.encoding.fill import WORKERS
from pipeline.encoding.jobs import read_order
from pipeline.encoding.progress import Report


def run(order_file: Path, report: Report, *, rank: int, num_ranks: int) -> None:
    """Encode an order with the worker of its kind.

    The worker sets torch's number of threads for its process. It is reset here, because later tests of this
    process compare floating-point results bit for bit.
    """
    import torch

    worker = import_module(f"{WORKERS[read_order(order_file).kind]}.__main__")
    threads = torch.get_num_threads()
    try:
        worker.run(order_file, report, rank=rank, num_ranks=num_ranks)
    finally:
        torch.set_num_threads(threads)
