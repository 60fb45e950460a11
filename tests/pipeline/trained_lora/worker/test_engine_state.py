"""What a training engine exchanges with other ranks, keeps between steps, saves and restores."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pipeline.errors import TrainingError
from pipeline.models.worker.family import load_family
from pipeline.recipe import LoraSettings, LossSettings
from pipeline.trained_lora.worker.engine import Engine
from pipeline.trained_lora.worker.loss import snr_weights
from tests.pipeline.trained_lora.project import ALL_MODULES
from tests.pipeline.trained_lora.text_encoder_project import project_of
from tests.pipeline.trained_lora.worker.engine_steps import engine_of, inputs_of, one_step
from tests.pipeline.trained_lora.worker.fp16 import with_loss_scaling

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


def finds_unused(engine: Engine) -> bool:
    handler: Any = engine.accelerator.ddp_handler
    return handler.find_unused_parameters


def test_ranks_search_for_unused_weights_only_if_some_may_be_unused(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(steps=1, lora=ALL_MODULES)
    assert not finds_unused(engine_of(project.job()))
    blocks = LoraSettings.model_validate({"rank": 4, "targets": "blocks"})
    assert finds_unused(engine_of(project.changed("blocks", lora=blocks).job()))
    assert finds_unused(engine_of(project_of(make_project, steps=1).job())), "trained text encoders"


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3])
def test_ranks_exchange_gradients_in_the_last_micro_batch_only(
    make_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch, num_micro_batches: int
) -> None:
    job = make_project(sizes={"64x64": 6}, steps=1, gradient_accumulation=num_micro_batches).job()
    engine, batch = engine_of(job), job.plan()[0]
    events = list[str]()
    backward = engine.accelerator.backward

    @contextmanager
    def no_sync(model: object) -> Generator[None]:
        assert isinstance(model, torch.nn.Module)
        events.append("without exchange:")
        yield

    def recorded_backward(loss: torch.Tensor) -> None:
        events.append("backward")
        backward(loss)

    monkeypatch.setattr(engine.accelerator, "no_sync", no_sync)
    monkeypatch.setattr(engine.accelerator, "backward", recorded_backward)
    engine.step(batch, iter(inputs_of(job, engine, batch)), stop=False)
    assert len(batch.micro_batches) == num_micro_batches
    assert events == [*["without exchange:", "backward"] * (num_micro_batches - 1), "backward"]


def test_losses_timesteps_and_stop_requests_are_summed_over_the_ranks(
    make_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second rank with equal numbers doubles the sums. A slot has one rank, so that nothing is averaged."""
    job = make_project(steps=2, gradient_accumulation=1).job()
    alone = one_step(engine_of(job), job, 0)
    assert not alone.stop
    engine, batch = engine_of(job), job.plan()[0]

    def reduce(values: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        others = values.clone()
        others[2, 0] = 1.0
        total = values + others
        return total if reduction == "sum" else total / 2

    monkeypatch.setattr(engine.accelerator, "reduce", reduce)
    outcome = engine.step(batch, iter(inputs_of(job, engine, batch)), stop=False)
    assert outcome.losses == pytest.approx([2 * loss for loss in alone.losses])
    assert outcome.timesteps == pytest.approx([2 * timestep for timestep in alone.timesteps])
    assert outcome.stop, "the other rank was asked to stop"


def test_gradients_do_not_remain_for_the_next_step(make_project: Callable[..., Project]) -> None:
    job = make_project(steps=2).job()
    engine = engine_of(job)
    one_step(engine, job, 0)
    assert [weight.grad for weight in engine.weights if weight.grad is not None and weight.grad.any()] == []


@pytest.mark.parametrize("weighting", ["min_snr", "debiased"])
def test_the_loss_of_a_sample_is_weighted_by_its_noise_level(
    make_project: Callable[..., Project], weighting: Any
) -> None:
    project = make_project(steps=1, gradient_accumulation=1, batch_size=4, sizes={"64x64": 4})
    settings = LossSettings(weighting=weighting)
    plain, weighted = project.job(), project.changed("weighted", loss=settings).job()
    engine = engine_of(plain)
    ((_, micro),) = inputs_of(plain, engine, plain.plan()[0])
    snr = load_family(plain.base).noise.signal_to_noise(engine.noise_scheduler, micro.timesteps)
    expected = engine.objective.losses(micro, engine.denoiser) * snr_weights(snr, settings, "epsilon")
    other = engine_of(weighted)
    torch.testing.assert_close(other.objective.losses(micro, other.denoiser), expected)
    assert len(set(snr.tolist())) == 4


@pytest.mark.usefixtures("any_precision")
def test_R05_steps_that_are_skipped_from_the_start_of_a_run_are_counted(
    make_project: Callable[..., Project],
) -> None:
    job = make_project(steps=40, gradient_accumulation=1, batch_size=1).job()
    engine = with_loss_scaling(engine_of(job))
    engine.weights[0].register_hook(lambda gradient: gradient + math.inf)
    for step in range(19):
        one_step(engine, job, step)
    with pytest.raises(TrainingError, match="skipped the last 20 steps, up to step 19"):
        one_step(engine, job, 19)


@pytest.mark.usefixtures("any_precision")
def test_R01_the_scale_of_fp16_is_saved_and_restored_and_may_be_missing(
    make_project: Callable[..., Project],
) -> None:
    job = make_project(steps=2, gradient_accumulation=1).job()
    plain, saved, resumed = (engine_of(job) for _ in range(3))
    assert set(plain.state(0).optimizer) == {"optimizer", "schedule"}

    # They are wrapped after all are created, because accelerate has one precision per process.
    for engine in (saved, resumed):
        with_loss_scaling(engine)
    scalers: list[Any] = [engine.accelerator.scaler for engine in (saved, resumed)]
    scalers[0].scale(torch.ones(()))  # creates its state
    scalers[0].update(new_scale=4.0)
    state = saved.state(1)
    assert set(state.optimizer) == {"optimizer", "schedule", "scaler"}
    resumed.restore(state)
    assert scalers[1].get_scale() == 4.0

    resumed.restore(plain.state(0))
    assert scalers[1].get_scale() == 4.0, "a run that began without fp16 has no scale"
    plain.restore(state)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_weights_are_finite_only_if_each_number_is(
    make_project: Callable[..., Project], value: float
) -> None:
    engine = engine_of(make_project(steps=1).job())
    assert engine.weights_finite()
    with torch.no_grad():
        engine.weights[-1].view(-1)[-1] = value
    assert not engine.weights_finite()
