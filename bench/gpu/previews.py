"""Previews on a GPU: drawing a prompt during training, with the VAE loaded for it and released afterwards."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from bench.gpu.experiment import Experiment, Pair, Reading, usual_parts
from bench.gpu.models import MODELS, BaseModel
from bench.gpu.rig import Bench
from bench.gpu.training import one_accelerator
from bench.gpu.watch import Watch

if TYPE_CHECKING:
    from pipeline.trained_lora.worker.engine import Engine

DENOISING_STEPS = 8


@contextmanager
def _drawn(bench: Bench, model: BaseModel) -> Generator[Pair]:
    from pipeline.trained_lora.worker.draw_previews import (
        draw_previews,
        load_drawing_pipeline,
        picture_settings,
    )
    from pipeline.trained_lora.worker.engine import Engine
    from pipeline.trained_lora.worker.loader import read_entry

    rig = bench.rig(model, "cached")
    job = rig.training_job(sample_every=1)
    prompts = tuple(replace(prompt, steps=DENOISING_STEPS) for prompt in job.prompts)
    job = replace(job, prompts=prompts)
    with one_accelerator():
        engine: Engine = Engine(job, rig.family)
        failures: list[str] = []

        def ours(watch: Watch) -> Reading:
            with watch.work():
                files = draw_previews(job, rig.family, engine, step=0, warn=failures.append)
            assert len(files) == len(prompts), failures
            return {}

        pipeline = load_drawing_pipeline(
            rig.family, job.recipe, denoiser=engine.denoiser, dtype="float32", device=bench.device
        )
        texts = [read_entry(job.store, prompt.text, prompt.caption) for prompt in prompts]
        empty = read_entry(job.store, job.empty_text, "the empty caption")

        def limit(watch: Watch) -> Reading:
            with watch.work(), engine.objective.evaluation():
                for prompt, text in zip(prompts, texts, strict=True):
                    settings = picture_settings(prompt, seed=job.recipe.training.seed)
                    rig.family.drawing.draw(pipeline, text, empty, settings)
            return {}

        yield Pair(len(prompts), ours, limit, {"denoising_steps": DENOISING_STEPS})


EXPERIMENTS = [
    Experiment(
        f"{model.name} preview",
        "previews of a training, with loading and releasing the VAE, and files",
        "the same pipeline with its VAE loaded, without files",
        usual_parts("pictures"),
        30.0,
        partial(_drawn, model=model),
    )
    for model in MODELS
]
