"""Training on a GPU: quantized weights, 8-bit optimizer, fp16, compiled blocks, resume, two processes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("pandera", reason="needs Pandera for the tables of the stages")

from bench.gpu.rig import Rig, Silent
from bench.gpu.training import one_accelerator
from pipeline.errors import TrainingError
from pipeline.models.worker.family import load_family
from pipeline.models.worker.offload.streamed_blocks import streamed_blocks
from pipeline.processes.launch import LocalLaunch
from pipeline.recipe import TrainingSettings
from pipeline.trained_lora.export.lora_files import read_lora_file
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.run_folder import RunLayout
from pipeline.trained_lora.worker.ema import AveragedWeights
from pipeline.trained_lora.worker.engine import Engine, StepOutcome
from pipeline.trained_lora.worker.loader import MicroBatchMaker
from pipeline.trained_lora.worker.loop import train
from pipeline.trained_lora.worker.stop_request import StopRequest
from tests.gpu.tiny_rigs import tiny_rigs
from tests.pipeline.trained_lora.worker.fp16 import with_loss_scaling
from tests.tensor_differences import differing_tensors

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

LORA_FILE = "pytorch_lora_weights.safetensors"


@pytest.fixture(scope="session")
def make_rig(device: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Rig]:
    """Return a function that returns a tiny model with a recipe and a cache, by the model's name."""
    return tiny_rigs(tmp_path_factory.mktemp("gpu"), device)


@pytest.fixture
def rig(make_rig: Callable[[str], Rig]) -> Iterator[Rig]:
    """A tiny FLUX.1, with accelerate's process-wide state reset before and after the test."""
    with one_accelerator():
        yield make_rig("FLUX.1")


class StopAfter(Silent):
    """A reporter that requests a stop when some steps are done."""

    def __init__(self, steps: int) -> None:
        self.steps, self.stop = steps, StopRequest()

    def progress(self, done: int, total: int, text: str, **details: str) -> None:
        self.stop.requested = done >= self.steps


def engine_of(job: TrainingJob) -> Engine:
    return Engine(job, load_family(job.base))


def outcomes(job: TrainingJob, engine: Engine) -> Iterator[StepOutcome]:
    """Train each step of the plan in turn."""
    maker = MicroBatchMaker(job, load_family(job.base), engine.noise_scheduler)
    for step, batch in job.plan().iterate():
        inputs = [(batch, maker.make(step, micro[0])) for micro in batch.micro_batches]
        yield engine.step(batch, iter(inputs), stop=False)


def with_precision(job: TrainingJob, precision: str) -> TrainingJob:
    accelerate = job.recipe.accelerate.model_copy(update={"mixed_precision": precision})
    return replace(job, recipe=job.recipe.model_copy(update={"accelerate": accelerate}))


def weights_of(job: TrainingJob) -> dict[str, Tensor]:
    file = read_lora_file(RunLayout(job.folder).exported / LORA_FILE)
    return {name: torch.from_numpy(tensor) for name, tensor in file.tensors.items()}


@pytest.mark.parametrize("kind", ["int8", "fp8_torchao", "nf4"])
def test_quantized_weights_take_less_memory_and_give_almost_the_same_losses(
    device: str, rig: Rig, kind: str
) -> None:
    if kind == "nf4" and device == "cpu":
        pytest.skip("diffusers packs nf4 on a GPU only")
    losses: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    for quantize in ("none", kind):
        job = rig.training_job(quantize=quantize, gradient_checkpointing=True)
        engine = engine_of(job)
        sizes[quantize] = sum(map(_size, engine.denoiser.parameters()))
        losses[quantize] = [outcome.loss for outcome in outcomes(job, engine)]
    assert losses[kind] != losses["none"]
    assert losses[kind] == pytest.approx(losses["none"], rel=0.15)
    assert sizes[kind] < 0.8 * sizes["none"]


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_eight_bit_products_take_less_memory_and_give_almost_the_same_losses(
    device: str, rig: Rig, kind: str
) -> None:
    if kind == "fp8" and device == "cpu":
        pytest.skip("fp8 products need a GPU")
    losses: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    for compute in ("none", kind):
        job = rig.training_job(compute=compute)
        engine = engine_of(job)
        sizes[compute] = sum(map(_size, engine.denoiser.parameters()))
        losses[compute] = [outcome.loss for outcome in outcomes(job, engine)]
    assert losses[kind] != losses["none"]
    assert losses[kind] == pytest.approx(losses["none"], rel=0.15)
    assert sizes[kind] < 0.9 * sizes["none"]  # layers outside of blocks are not packed


def _size(weight: Tensor) -> int:
    packed: Any = getattr(weight, "__tensor_flatten__", None)
    parts = [getattr(weight, name) for name in packed()[0]] if packed else [weight]
    return sum(part.numel() * part.element_size() for part in parts)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_the_8_bit_adamw_follows_the_one_of_32_bits(rig: Rig) -> None:
    losses = {}
    for optimizer in ("adamw", "adamw8bit"):
        job = rig.training_job(optimizer=optimizer)
        losses[optimizer] = [outcome.loss for outcome in outcomes(job, engine_of(job))]
    assert losses["adamw8bit"] == pytest.approx(losses["adamw"], rel=0.05)


def test_fp16_skips_a_step_whose_gradient_overflows_and_trains_on(device: str, rig: Rig) -> None:
    job = rig.training_job()
    if device == "cpu":
        engine = with_loss_scaling(engine_of(with_precision(job, "no")))
    else:
        engine = engine_of(with_precision(job, "fp16"))
    scaler = engine.accelerator.scaler
    assert scaler is not None

    before = [weight.detach().clone() for weight in engine.weights]
    overflow = engine.weights[0].register_hook(lambda gradient: gradient + math.inf)
    steps = outcomes(job, engine)
    assert math.isinf(next(steps).grad_norm)
    assert differing_tensors(engine.weights, before) == []
    scale = scaler.get_scale()

    overflow.remove()
    later = list(steps)
    assert [each for each in later if not math.isfinite(each.loss) or not math.isfinite(each.grad_norm)] == []
    assert scaler.get_scale() == scale
    assert differing_tensors(engine.weights, before) != [], "later steps must change the weights"


def test_a_step_that_is_not_finite_is_an_error_and_changes_nothing(device: str, rig: Rig) -> None:
    """On a GPU the device itself skips the update; the host reads the numbers afterwards."""
    job = rig.training_job()
    engine = engine_of(job)
    assert (engine._on_device is not None) == (device != "cpu")
    before = [weight.detach().clone() for weight in engine.weights]
    engine.weights[0].register_hook(lambda gradient: gradient + math.inf)
    with pytest.raises(TrainingError, match="the gradient of step 0 must be finite"):
        next(outcomes(job, engine))
    assert differing_tensors(engine.weights, before) == []


@pytest.mark.parametrize(
    "training",
    [
        {},
        {"ema_decay": 0.9},
        {"gradient_checkpointing": True},
        {"quantize": "nf4", "gradient_checkpointing": True},
        {"quantize": "int8", "gradient_checkpointing": True},
        {"compute": "int8"},
        {"compute": "fp8"},
        {"offload": 0, "gradient_checkpointing": True},
        {"offload": 0, "compute": "int8"},
        {"compile": True},
    ],
    ids=lambda training: "-".join(f"{name}={value}" for name, value in training.items()) or "bf16",
)
def test_the_host_does_not_wait_for_the_gpu_in_a_step(
    device: str, rig: Rig, training: dict[str, Any]
) -> None:
    """torch raises at each call that waits, such as `.item()` or the text of a tensor."""
    needs_gpu = training.get("quantize") == "nf4" or training.get("compute") == "fp8" or "compile" in training
    if needs_gpu and device == "cpu":
        pytest.skip("needs a GPU")
    job = rig.training_job(**training)
    engine = engine_of(job)
    maker = MicroBatchMaker(job, load_family(job.base), engine.noise_scheduler)
    for step, batch in job.plan().iterate():
        # A run copies its inputs from pinned memory, without waiting.
        inputs = [
            (batch, maker.make(step, micro[0]).to(engine.accelerator.device)) for micro in batch.micro_batches
        ]

        # The first two steps compile kernels and allocate memory.
        with waits_are_errors(device if step > 1 else "cpu"):
            queued = engine.start(batch, iter(inputs), stop=False)
        assert math.isfinite(engine.finish(queued).loss)


@contextmanager
def waits_are_errors(device: str) -> Iterator[None]:
    if device == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_blocks_give_almost_the_same_losses(device: str, rig: Rig) -> None:
    losses = {}
    for is_compiled in (False, True):
        job = rig.training_job(compile=is_compiled)
        engine = engine_of(job)
        if is_compiled and device == "cpu":
            denoiser: Any = engine.denoiser
            denoiser.compile_repeated_blocks(backend="eager")  # the default needs a C++ compiler
        losses[is_compiled] = [outcome.loss for outcome in outcomes(job, engine)]
    assert losses[True] == pytest.approx(losses[False], rel=0.02)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("quantize", ["none", "int8", "nf4"])
def test_streamed_blocks_give_the_same_losses(
    device: str, rig: Rig, quantize: str, checkpointing: bool
) -> None:
    if quantize == "nf4" and (device == "cpu" or not checkpointing):
        pytest.skip("nf4 needs a GPU, and gradient checkpointing to be streamed")
    losses = {}
    for offload in ("none", 0, 1):
        job = rig.training_job(offload=offload, quantize=quantize, gradient_checkpointing=checkpointing)
        engine = engine_of(job)
        losses[offload] = [outcome.loss for outcome in outcomes(job, engine)]
        if offload == 0:
            _require_slots_on(device, engine)
    tolerance = 0.0 if device == "cpu" else 1e-3  # some kernels of CUDA add in any order
    assert losses[0] == pytest.approx(losses["none"], rel=tolerance)
    assert losses[1] == pytest.approx(losses["none"], rel=tolerance)


def _require_slots_on(device: str, engine: Engine) -> None:
    streamed = streamed_blocks(engine.denoiser)
    assert streamed is not None
    assert {slot.device.type for slot in streamed.store.slots} == {device}
    weights = engine.denoiser.named_parameters()
    assert [name for name, weight in weights if weight.device.type != device] == []


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(
    device: str, rig: Rig, quantize: str
) -> None:
    # A GPU's steps are read one step late, so that the stop takes effect some steps later.
    whole, cut = (
        replace(rig.training_job(quantize=quantize, steps=8), run=f"{number}{quantize}".ljust(16, "0"))
        for number in (1, 2)
    )
    assert train(whole, Silent(), StopRequest())
    report = StopAfter(2)
    assert not train(cut, report, report.stop)
    assert train(cut, Silent(), StopRequest())

    expected, actual = weights_of(whole), weights_of(cut)
    assert set(actual) == set(expected)
    tolerance = 0.0 if device == "cpu" else 1e-3  # some kernels of CUDA add in any order
    for name, weight in expected.items():
        torch.testing.assert_close(actual[name], weight, rtol=0.0, atol=tolerance * float(weight.abs().max()))


def test_two_processes_train_together(device: str, make_rig: Callable[[str], Rig], tmp_path: Path) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    job = make_rig("FLUX.1").training_job(batch_size=2)
    accelerate = job.recipe.accelerate.model_copy(update={"num_processes": 2})
    recipe = job.recipe.model_copy(update={"accelerate": accelerate, "output_dir": tmp_path / "out"})
    job = replace(job, recipe=recipe)
    LocalLaunch(accelerate)("pipeline.trained_lora.worker", job.write())
    result = json.loads((job.folder / "result.json").read_text(encoding="utf-8"))
    assert result["steps"] == len(job.plan())
    assert [name for name, weight in weights_of(job).items() if not torch.isfinite(weight).all()] == []


def test_the_moving_average_is_that_of_the_cpu(device: str) -> None:
    values = [torch.randn(16, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    averages: dict[str, list[Tensor]] = {}
    for place in ("cpu", device):
        weights = [torch.nn.Parameter(torch.zeros(16, 4, device=place)) for _ in range(2)]
        average = AveragedWeights(weights, torch.optim.SGD(weights), TrainingSettings(ema_decay=0.5))
        for value in values:
            with torch.no_grad():
                for weight in weights:
                    weight.copy_(value)
            average.update()
        with average.applied():
            averages[place] = [weight.detach().cpu().clone() for weight in weights]
    torch.testing.assert_close(averages[device], averages["cpu"])
