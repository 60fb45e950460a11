"""`python -m pipeline.text_embeddings.worker <encoding.json>`: encode captions."""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.encoding.progress import Report
from pipeline.encoding.worker.main import main
from pipeline.processes.guard import end_now


def run(encoding_file: Path, report: Report, *, rank: int, num_ranks: int) -> None:
    """See `pipeline.encoding.worker.run.run`."""
    from pipeline.encoding.worker import run as encoding
    from pipeline.text_embeddings.worker.encoder import TextEncoder

    encoding.run(encoding_file, report, rank=rank, num_ranks=num_ranks, open_encoder=TextEncoder)


def import_libraries() -> None:
    """Import what every encoding needs, and nothing that uses a GPU."""
    from pipeline.models.worker import loading

    loading.import_libraries("pipeline.text_embeddings.worker.encoder")


if __name__ == "__main__":
    main(Path(sys.argv[1]), run)
    end_now(0)
