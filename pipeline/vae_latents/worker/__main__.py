"""`python -m pipeline.vae_latents.worker <encoding.json>`: encode images."""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.encoding.progress import Report
from pipeline.encoding.worker.main import main
from pipeline.processes.guard import end_now


def run(encoding_file: Path, report: Report, *, rank: int, num_ranks: int) -> None:
    """See `pipeline.encoding.worker.run.run`."""
    from pipeline.encoding.worker import run as encoding
    from pipeline.vae_latents.worker.encoder import LatentEncoder
    from pipeline.vae_latents.worker.reconstruct import draw_pictures

    encoding.run(
        encoding_file,
        report,
        rank=rank,
        num_ranks=num_ranks,
        open_encoder=LatentEncoder,
        draw=draw_pictures,
    )


def import_libraries() -> None:
    """Import what every encoding needs, and nothing that uses a GPU."""
    from pipeline.models.worker import loading

    loading.import_libraries("pipeline.vae_latents.worker.encoder", "pipeline.vae_latents.worker.reconstruct")


if __name__ == "__main__":
    main(Path(sys.argv[1]), run)
    end_now(0)
