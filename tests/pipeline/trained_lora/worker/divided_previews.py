"""`python -m tests.pipeline.trained_lora.worker.divided_previews <job.json>`: draw the previews of step 0.

A process of a training run that writes how many pictures it drew and what it returned to `rank-<rank>.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pipeline.models.worker.family import load_family
from pipeline.trained_lora.job import read_job
from pipeline.trained_lora.worker.draw_previews import draw_divided_previews
from pipeline.trained_lora.worker.engine import Engine


def main(job_file: Path) -> None:
    job = read_job(job_file)
    family = load_family(job.base)
    engine = Engine(job, family)
    drawn: list[int] = []
    draw = family.drawing.draw

    def record(pipeline: Any, text: Any, *more: Any, **options: Any) -> Any:
        drawn.append(len(drawn))
        if rank == 1 and len(drawn) == 2:
            raise ValueError("the second process draws no second picture")
        return draw(pipeline, text, *more, **options)

    rank = engine.accelerator.process_index
    family.drawing.draw = record  # pyright: ignore[reportAttributeAccessIssue] - counts the calls
    warnings: list[str] = []
    files = draw_divided_previews(job, family, engine, step=0, warn=warnings.append)
    result = {"drawn": len(drawn), "files": [file.name for file in files], "warnings": warnings}
    job_file.with_name(f"rank-{rank}.json").write_text(json.dumps(result))
    engine.accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
