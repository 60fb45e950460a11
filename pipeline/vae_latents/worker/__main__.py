"""`python -m pipeline.vae_latents.worker <encoding.json>`: encode images.

With `--wait` in place of the file, it imports what it needs, and waits for its job.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.encoding.progress import Report
from pipeline.encoding.worker.main import main
from pipeline.processes.guard import end_now
from pipeline.processes.waiting import job_file


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
    main(job_file(import_libraries), run)
    end_now(0)
