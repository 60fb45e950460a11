"""`python -m tests.pipeline.trained_lora.worker.sharded_shares <job.json>`: write the share of each process.

A process of a training run that loads its engine, takes one step and ends.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pipeline.models.worker.family import load_family
from pipeline.trained_lora.job import read_job
from pipeline.trained_lora.worker.adapter.lora import trainable_weights
from pipeline.trained_lora.worker.engine import Engine
from pipeline.trained_lora.worker.loader import MicroBatchMaker
from pipeline.trained_lora.worker.sharding import share_bytes


def main(job_file: Path) -> None:
    job = read_job(job_file)
    family = load_family(job.base)
    engine = Engine(job, family)
    rank, batch = engine.accelerator.process_index, job.plan()[0]
    maker = MicroBatchMaker(job, family, engine.noise_scheduler)

    shares = [share_bytes(engine.denoiser)]
    inputs = [(batch, maker.make(0, micro[rank])) for micro in batch.micro_batches]
    engine.step(batch, iter(inputs), stop=False)
    with engine.objective.evaluation():
        engine.objective.losses(inputs[0][1].to(engine.accelerator.device), engine.denoiser)
    shares.append(share_bytes(engine.denoiser))
    weights = sum(weight.numel() for weight in trainable_weights(engine.denoiser))
    result = {"shares": shares, "num_trained_weights": weights}
    job_file.with_name(f"rank-{rank}.json").write_text(json.dumps(result))
    engine.accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
