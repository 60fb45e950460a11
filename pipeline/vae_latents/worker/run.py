"""Encode one rank's share of the missing latents."""

from __future__ import annotations

from pathlib import Path

from pipeline.encoding.progress import Report
from pipeline.encoding.worker import run as encoding
from pipeline.vae_latents.worker.encoder import LatentEncoder
from pipeline.vae_latents.worker.reconstruct import draw_pictures


def run(order_file: Path, report: Report, *, rank: int, num_ranks: int) -> None:
    """See `pipeline.encoding.worker.run.run`."""
    encoding.run(
        order_file,
        report,
        rank=rank,
        num_ranks=num_ranks,
        open_encoder=LatentEncoder,
        draw=draw_pictures,
    )
