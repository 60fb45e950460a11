"""`python -m tests.pipeline.trained_lora.worker.streamed_shares <job.json>`: write how the host holds blocks.

A process of a training run that loads its engine, takes one step and ends.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from torch import distributed

from pipeline.models.worker.family import load_family
from pipeline.models.worker.offload.streamed_blocks import streamed_blocks
from pipeline.trained_lora.job import read_job
from pipeline.trained_lora.worker.engine import Engine
from pipeline.trained_lora.worker.loader import MicroBatchMaker
from tests.pipeline.models.worker.offload.mappings import open_files, shared_mappings


def main(job_file: Path) -> None:
    job = read_job(job_file)
    family = load_family(job.base)
    engine = Engine(job, family)
    rank, batch = engine.accelerator.process_index, job.plan()[0]
    maker = MicroBatchMaker(job, family, engine.noise_scheduler)
    inputs = [(batch, maker.make(0, micro[rank])) for micro in batch.micro_batches]
    engine.step(batch, iter(inputs), stop=False)

    # Every process has copied all of its blocks, and none has ended.
    distributed.barrier()
    streamed = streamed_blocks(engine.denoiser)
    assert streamed is not None
    result = {"mapped": shared_mappings(), "open": open_files(), "blocks": streamed.store.block_bytes}
    job_file.with_name(f"rank-{rank}.json").write_text(json.dumps(result))
    distributed.barrier()
    engine.accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
