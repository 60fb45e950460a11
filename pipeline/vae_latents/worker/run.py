"""Encode one process's share of the missing latents."""

from __future__ import annotations

from pathlib import Path

from pipeline.encoding.progress import Report
from pipeline.encoding.worker import run as encoding
from pipeline.vae_latents.worker.encoder import LatentEncoder
from pipeline.vae_latents.worker.reconstruct import decode_beside


def run(order_file: Path, report: Report, *, rank: int, num_ranks: int) -> None:
    """Encode this process's share of the order, as `pipeline.encoding.worker.run`."""
    encoding.run(
        order_file,
        report,
        rank=rank,
        num_ranks=num_ranks,
        open_encoder=LatentEncoder,
        show=decode_beside,
    )
