"""Memory that really runs out, on a GPU or a CPU, and work that continues afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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
from pipeline.errors import TrainingError
from pipeline.models.worker.family import WorkerFamily
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.worker.draw_previews import draw_previews
from pipeline.trained_lora.worker.engine import Engine
from pipeline.trained_lora.worker.loader import MicroBatchMaker
from pipeline.trained_lora.worker.loop import train
from pipeline.trained_lora.worker.stop_request import StopRequest
from pipeline.vae_latents.worker.vae_batches import EncodedImage, VaeBatches
from tests.gpu.memory_limit import MIB, memory_left
from tests.gpu.tiny_rigs import tiny_rigs

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

TF32 = 2e-2
"""Largest difference relative to the largest value, as in `test_families.py`."""

LITTLE = 48 * MIB
"""Less memory than a training step or a decoded picture of 1024 px needs, and enough for smaller work."""


@pytest.fixture(scope="module")
def make_rig(device: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Rig]:
    return tiny_rigs(tmp_path_factory.mktemp("memory"), device, edge_px=1024)


@pytest.fixture
def rig(make_rig: Callable[[str], Rig]) -> Iterator[Rig]:
    with one_accelerator():
        yield make_rig("FLUX.1")


@pytest.fixture
def family(rig: Rig) -> WorkerFamily:
    return rig.family


def with_precision_of(device: str, job: TrainingJob) -> TrainingJob:
    """Return the job in float32 on a CPU, where bf16 products without memory are not a clear error."""
    if device == "cuda":
        return job
    accelerate = job.recipe.accelerate.model_copy(update={"mixed_precision": "no"})
    return replace(job, recipe=job.recipe.model_copy(update={"accelerate": accelerate}))


def images(number: int, edge_px: int) -> list[tuple[str, np.ndarray]]:
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (number, edge_px, edge_px, 3), dtype=np.uint8)
    return [(f"{index}.png", each) for index, each in enumerate(pixels)]


def assert_close(actual: list[EncodedImage], expected: list[EncodedImage]) -> None:
    for one, other in zip(actual, expected, strict=True):
        largest = float(other.posterior.mean.abs().max())
        difference = one.posterior.mean - other.posterior.mean
        assert float(difference.abs().max()) <= TF32 * largest


def test_a_batch_of_images_is_halved_when_memory_runs_out(device: str, family: WorkerFamily) -> None:
    """An image of 512 px needs about 60 MiB in the tiny VAE."""
    messages: list[str] = []
    batches = VaeBatches(family, dtype="float32", device=device, say=messages.append)
    batch = images(4, 512)
    expected = [next(batches.encode([each])) for each in batch]
    with memory_left(device, 160 * MIB):
        halved = list(batches.encode(batch))
    assert messages[0] == "memory ran out with a batch of 4 images, continuing with 2"
    assert [each.tile_px for each in halved] == [0] * 4
    assert_close(halved, expected)


def test_an_image_is_cut_into_tiles_when_memory_runs_out(device: str, family: WorkerFamily) -> None:
    messages: list[str] = []
    batches = VaeBatches(family, dtype="float32", device=device, say=messages.append)
    with memory_left(device, 150 * MIB):
        (tiled,) = batches.encode(images(1, 1024))
    assert messages[0] == "0.png does not fit into memory, encoding it in tiles of 512 px"
    assert tiled.tile_px > 0
    assert torch.isfinite(tiled.posterior.mean).all()

    # A smaller image is not tiled, and needs no more memory than there is now.
    (untiled,) = batches.encode(images(1, 512))
    assert untiled.tile_px == 0


class LimitIn(Silent):
    """A reporter that limits the memory from the start of a phase on."""

    def __init__(self, phase: str, device: str, num_bytes: int) -> None:
        self.phase_name, self.device, self.num_bytes = phase, device, num_bytes
        self.limit = ExitStack()

    def phase(self, text: str) -> None:
        if text.startswith(self.phase_name):
            self.limit.enter_context(memory_left(self.device, self.num_bytes))


def test_the_trial_step_reports_missing_memory_with_advice_and_the_next_run_trains(
    device: str, rig: Rig, tmp_path: Path
) -> None:
    job = with_precision_of(device, rig.training_job(batch_size=4, steps=2, gradient_checkpointing=False))
    job = replace(job, recipe=job.recipe.model_copy(update={"output_dir": tmp_path / "out"}))
    report = LimitIn("trial step", device, LITTLE)
    with report.limit, pytest.raises(TrainingError, match="memory ran out in the trial step") as raised:
        train(job, report, StopRequest())
    assert "set training.gradient_checkpointing: true" in str(raised.value)
    assert "set training.batch_size: 2" in str(raised.value)

    assert train(job, Silent(), StopRequest())


def test_a_step_runs_out_of_memory_and_later_steps_train(device: str, rig: Rig) -> None:
    job = with_precision_of(device, rig.training_job(batch_size=4))
    engine = Engine(job, rig.family)
    maker = MicroBatchMaker(job, rig.family, engine.noise_scheduler)

    def loss_of(step: int) -> float:
        batch = job.plan()[step]
        inputs = [(batch, maker.make(step, micro[0])) for micro in batch.micro_batches]
        return engine.step(batch, iter(inputs), stop=False).loss

    with memory_left(device, LITTLE), pytest.raises(RuntimeError, match="memory"):
        loss_of(0)
    assert [step for step in range(3) if not math.isfinite(loss_of(step))] == []


def test_previews_are_decoded_in_tiles_when_memory_runs_out_and_training_goes_on(
    device: str, rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = with_precision_of(device, rig.training_job(sample_every=2))
    prompts = tuple(replace(prompt, steps=1) for prompt in job.prompts)
    recipe = job.recipe.model_copy(update={"output_dir": tmp_path / "out"})
    job = replace(job, recipe=recipe, prompts=prompts)
    engine = Engine(job, rig.family)
    load, loaded, limit = rig.family.vae.load, list[tuple[str, Any]](), ExitStack()

    def load_and_limit(dtype: str, place: str) -> Any:
        """Load a VAE, and limit the memory when the first one decodes."""
        vae: Any = load(dtype, place)
        loaded.append((dtype, vae))

        def begin(*_: Any) -> None:
            limit.enter_context(memory_left(device, LITTLE))
            hook.remove()

        if dtype == "float32":
            hook = vae.decoder.register_forward_pre_hook(begin)
        return vae

    monkeypatch.setattr(rig.family.vae, "load", load_and_limit)
    with limit:
        files = draw_previews(job, rig.family, engine, step=2, warn=pytest.fail)
    assert [(dtype, vae.use_tiling) for dtype, vae in loaded] == [("float32", False), ("bfloat16", True)]
    assert len(files) == len(job.prompts)
    for path in files:
        with Image.open(path) as picture:
            assert np.asarray(picture).std() > 1.0, "of one colour"

    maker = MicroBatchMaker(job, rig.family, engine.noise_scheduler)
    batch = job.plan()[0]
    inputs = [(batch, maker.make(0, micro[0])) for micro in batch.micro_batches]
    assert math.isfinite(engine.step(batch, iter(inputs), stop=False).loss)
