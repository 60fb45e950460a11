"""`python -m pipeline.diagnosis.worker <encoding.json>`: measure captions or influences of images."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.encoding.progress import Report
from pipeline.encoding.worker.main import main
from pipeline.processes.guard import end_now

if TYPE_CHECKING:
    from pipeline.encoding.jobs import Encoding
    from pipeline.encoding.progress import Progress
    from pipeline.encoding.worker.run import Encoder


def run(encoding_file: Path, report: Report, *, rank: int, num_ranks: int) -> None:
    """See `pipeline.encoding.worker.run.run`."""
    from pipeline.encoding.worker import run as encoding

    encoding.run(encoding_file, report, rank=rank, num_ranks=num_ranks, open_encoder=open_encoder)


def open_encoder(encoding: Encoding, device: str, progress: Progress) -> Encoder:
    """Return the measurement of an encoding's entries."""
    del device  # accelerate's own
    if encoding.kind == "influences":
        from pipeline.diagnosis.worker.influence import InfluenceEncoder

        return InfluenceEncoder(encoding, progress)

    from pipeline.diagnosis.worker.measure import SwapEncoder

    return SwapEncoder(encoding, progress)


if __name__ == "__main__":
    main(Path(sys.argv[1]), run)
    end_now(0)
