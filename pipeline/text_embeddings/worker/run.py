"""Encode one rank's share of the missing text embeddings."""

from __future__ import annotations

from pathlib import Path

from pipeline.encoding.progress import Report
from pipeline.encoding.worker import run as encoding
from pipeline.text_embeddings.worker.encoder import TextEncoder


def run(order_file: Path, report: Report, *, rank: int, num_ranks: int) -> None:
    """See `pipeline.encoding.worker.run.run`."""
    encoding.run(
        order_file,
        report,
        rank=rank,
        num_ranks=num_ranks,
        open_encoder=TextEncoder,
    )
