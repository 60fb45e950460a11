"""`python -m pipeline.captions.worker <encoding.json>`: caption images."""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.encoding.progress import Report
from pipeline.encoding.worker.main import main
from pipeline.processes.guard import end_now


def run(encoding_file: Path, report: Report, *, rank: int, num_ranks: int) -> None:
    """See `pipeline.encoding.worker.run.run`."""
    from pipeline.captions.worker.captioner import CaptionEncoder
    from pipeline.encoding.worker import run as encoding

    encoding.run(encoding_file, report, rank=rank, num_ranks=num_ranks, open_encoder=CaptionEncoder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), run)
    end_now(0)
