"""Previews on a GPU: pictures of each precision, memory afterwards, and `latentline sample`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("pandera", reason="needs Pandera for the tables of the stages")

from bench.gpu.rig import Rig, Silent
from bench.gpu.training import one_accelerator
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.processes.worker.devices import allow_tf32
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.pictures.job import DrawingJob, LoraChoice
from pipeline.trained_lora.pictures.worker.artist import draw_pictures
from pipeline.trained_lora.previews import preview_file
from pipeline.trained_lora.run_folder import RunLayout
from pipeline.trained_lora.worker.draw_previews import (
    draw_previews,
    load_drawing_pipeline,
    picture_settings,
)
from pipeline.trained_lora.worker.engine import Engine
from pipeline.trained_lora.worker.loader import MicroBatchMaker, read_entry
from pipeline.trained_lora.worker.loop import train
from pipeline.trained_lora.worker.stop_request import StopRequest
from tests.gpu.tiny_rigs import tiny_rigs

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

NUM_STEPS = 3
"""Denoising steps of a picture."""

LORA_FILE = "pytorch_lora_weights.safetensors"

OVERFLOWING_GAIN = 1e7
"""Gain of the decoder's first convolution: its values exceed 65504, the maximum of float16. The following
norms remove it, as in the published VAE of SDXL."""


@pytest.fixture(scope="module")
def make_rig(device: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Rig]:
    return tiny_rigs(tmp_path_factory.mktemp("previews"), device)


@pytest.fixture(params=["SDXL", "FLUX.1"])
def rig(request: pytest.FixtureRequest, make_rig: Callable[[str], Rig]) -> Iterator[Rig]:
    with one_accelerator():
        yield make_rig(request.param)


def job_of(rig: Rig, folder: Path, precision: str = "bf16", **training: Any) -> TrainingJob:
    """Return a job with few denoising steps and its own folder."""
    job = rig.training_job(sample_every=2, **training)
    accelerate = job.recipe.accelerate.model_copy(update={"mixed_precision": precision})
    recipe = job.recipe.model_copy(update={"accelerate": accelerate, "output_dir": folder / "out"})
    prompts = tuple(replace(prompt, steps=NUM_STEPS) for prompt in job.prompts)
    assert len(prompts) == 2
    return replace(job, recipe=recipe, prompts=prompts)


def pixels_of(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"), dtype=np.float64)


def with_overflowing_vae(family: WorkerFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    load = family.vae.load

    def load_overflowing(dtype: str, device: str) -> Any:
        vae: Any = load(dtype, device)
        with torch.no_grad():
            vae.decoder.conv_in.weight.mul_(OVERFLOWING_GAIN)
        return vae

    monkeypatch.setattr(family.vae, "load", load_overflowing)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_previews_are_pictures_even_if_the_vae_overflows_in_float16(
    device: str, rig: Rig, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if precision == "fp16" and device == "cpu":
        pytest.skip("accelerate refuses fp16 on a CPU")
    job = job_of(rig, tmp_path, precision)
    family = load_family(job.base)
    with_overflowing_vae(family, monkeypatch)
    warnings: list[str] = []
    files = draw_previews(job, family, Engine(job, family), step=2, warn=warnings.append)
    assert warnings == []
    assert len(files) == len(job.prompts)
    assert [path.name for path in files if pixels_of(path).std() < 1.0] == [], "of one colour"


def test_training_goes_on_after_previews_with_the_memory_from_before(
    device: str, rig: Rig, tmp_path: Path
) -> None:
    job = job_of(rig, tmp_path)
    family = load_family(job.base)
    engine = Engine(job, family)
    maker = MicroBatchMaker(job, family, engine.noise_scheduler)
    losses: list[float] = []
    held_bytes: list[int] = []
    for step, batch in job.plan().iterate():
        inputs = [(batch, maker.make(step, micro[0])) for micro in batch.micro_batches]
        losses.append(engine.step(batch, iter(inputs), stop=False).loss)
        if device == "cuda":
            held_bytes.append(torch.cuda.memory_allocated())
        assert len(draw_previews(job, family, engine, step=step, warn=pytest.fail)) == len(job.prompts)
    assert [loss for loss in losses if not math.isfinite(loss)] == []

    # The first step also allocates gradients and the optimizer's state.
    assert len(set(held_bytes[1:])) <= 1, held_bytes


def test_pictures_are_almost_those_that_the_cpu_draws(device: str, rig: Rig, tmp_path: Path) -> None:
    job = job_of(rig, tmp_path)
    family = load_family(job.base)
    prompt = job.prompts[0]
    pictures = {}
    allow_tf32(device)
    for place in ("cpu", device):
        denoiser = family.denoiser.load("float32", place)
        pipeline = load_drawing_pipeline(family, job.recipe, denoiser=denoiser, dtype="float32", device=place)
        picture = family.drawing.draw(
            pipeline,
            read_entry(job.store, prompt.text, "prompt"),
            read_entry(job.store, job.empty_text, "empty prompt"),
            picture_settings(prompt, seed=0),
        )
        pictures[place] = np.asarray(picture, dtype=np.float64)
    assert np.abs(pictures[device] - pictures["cpu"]).mean() <= 2.0


def test_sample_draws_the_last_preview_again_from_the_exported_file(
    device: str, rig: Rig, tmp_path: Path
) -> None:
    job = job_of(rig, tmp_path, steps=2)
    assert train(job, Silent(), StopRequest())
    run = RunLayout(job.folder)
    drawing = DrawingJob(
        recipe=job.recipe,
        base=job.base,
        empty_text=job.empty_text,
        prompts=job.prompts,
        loras=(LoraChoice(run.exported / LORA_FILE),),
        strengths=(1.0,),
        seed=job.recipe.training.seed,
        folder=tmp_path / "pictures",
    )
    drawing.folder.mkdir()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    draw_pictures(drawing, Silent(), scratch=scratch)

    tolerance = 0.0 if device == "cpu" else 2.0  # some kernels of CUDA add in any order
    for cell in drawing.cells():
        preview = pixels_of(preview_file(run.previews, 2, cell.number))
        assert preview.std() > 1.0, "of one colour"
        assert np.abs(pixels_of(cell.path) - preview).mean() <= tolerance
