"""Main of an encoding process: `python -m pipeline.vae_latents.worker <encoding.json>`.

Accelerate launches several of them and sets the rank; a single process is started directly.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pipeline.encoding.progress import Report
from pipeline.processes.guard import end_now, watch_parent
from pipeline.processes.pipes import rank, reporter


def main(encoding_file: Path) -> None:
    """Encode the images of `encoding_file` that belong to this rank, and report progress to the parent."""
    watch_parent()
    with reporter() as report:
        from pipeline.models.worker.loading import keep_quiet

        keep_quiet()
        from pipeline.processes.worker.devices import used_memory_text

        report.lines.memory = used_memory_text
        run(encoding_file, report, rank=rank(), num_ranks=int(os.environ.get("WORLD_SIZE", "1")))


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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    end_now(0)
