"""Training at the scales 1 and -1 of a slider."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
import torch
from torch import Tensor

from pipeline.models.worker.family import load_family
from pipeline.trained_lora.inputs import TrainingInputs
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.worker.adapter.lora import (
    ADAPTER,
    adapter_state,
    load_adapter_state,
    lora_modules,
    scaled_adapters,
)
from pipeline.trained_lora.worker.engine import Engine
from pipeline.trained_lora.worker.loader import MicroBatchMaker
from pipeline.trained_lora.worker.micro_input import MicroInput
from pipeline.trained_lora.worker.validation import Validation
from tests.pipeline.trained_lora.slider_project import slider_project
from tests.pipeline.trained_lora.worker.engine_steps import engine_of, inputs_of, one_step

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"rslora": True},
    "pissa": {"init": "pissa"},
    "loha": {"kind": "loha"},
    "lokr": {"kind": "lokr"},
}

SIGN = {"loha": "hada_w1_a", "lokr": "lokr_w1"}
"""Weight whose sign is that of the adapter's effect, by kind; `lora_B` of the others."""


def micro_batches(job: TrainingJob, steps: int) -> dict[tuple[str, int, int], tuple[MicroInput, int]]:
    """Return each slot's micro-batch and place in it, by (variant_id, epoch, occurrence)."""
    family = load_family(job.base)
    maker = MicroBatchMaker(job, family, family.noise.load_scheduler())
    return {
        (slot.variant_id, slot.epoch, slot.occurrence): (micro, place)
        for step in job.plan()[:steps]
        for shares in step.micro_batches
        for micro in [maker.make(step.step, shares[0]).to(torch.device("cpu"))]
        for place, slot in enumerate(shares[0])
    }


def test_the_images_of_a_pair_share_noise_and_timestep_and_no_others_do(
    make_project: Callable[..., Project],
) -> None:
    noise = {"offset": 0.2, "input_perturbation": 0.3}
    job = slider_project(make_project, sizes={"64x64": 8, "32x96": 4}, steps=9, noise=noise).job()
    found = micro_batches(job, 9)
    bright = {slot: at for slot, at in found.items() if slot[0].startswith("bright/")}
    assert len(bright) == 18
    for (variant_id, epoch, occurrence), (micro, place) in bright.items():
        other, at = found[variant_id.replace("bright/", "dark/"), epoch, occurrence]
        assert (micro.lora_scale, other.lora_scale) == (1, -1)
        assert torch.equal(micro.timesteps[place], other.timesteps[at])
        assert torch.equal(micro.noise[place], other.noise[at])
        assert torch.equal(micro.input_noise[place], other.input_noise[at])
        assert not torch.equal(micro.latent[place], other.latent[at])
    noises = {micro.noise[place].numpy().tobytes() for micro, place in found.values()}
    assert len(noises) == len(bright)


@pytest.mark.parametrize("name", KINDS)
def test_the_gradient_at_scale_minus_1_is_that_of_the_negated_adapter(
    make_project: Callable[..., Project], name: str
) -> None:
    lora = {"rank": 4, "alpha": 2.0, **KINDS[name]}
    settings: dict[str, Any] = {"lora": lora, "gradient_accumulation": 1, "gradient_checkpointing": True}
    job = slider_project(make_project, sizes={"64x64": 4}, steps=2, **settings).job()
    dark = next(step for step in job.plan() if step.slots()[0].variant_id.startswith("dark/"))

    engine, negated = engine_of(job), engine_of(job)
    random = torch.Generator().manual_seed(0)
    weights = {
        key: value + 0.1 * torch.randn(value.shape, generator=random)
        for key, value in adapter_state(engine.denoiser).items()
    }
    sign = SIGN.get(name, "lora_B")
    for each in (engine, negated):
        load_adapter_state(each.denoiser, weights)
    for key, weight in negated.denoiser.named_parameters():
        if sign in key:  # in PiSSA's frozen adapter, too
            weight.data.neg_()

    ((_, micro),) = inputs_of(job, engine, dark)
    assert micro.lora_scale == -1
    opposite = gradients_of(engine, micro)
    plain = gradients_of(negated, replace(micro, lora_scale=1))
    assert max(float(gradient.abs().max()) for gradient in opposite.values()) > 0
    for key, gradient in opposite.items():
        expected = -plain[key] if sign in key else plain[key]
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-8)


def gradients_of(engine: Engine, micro: MicroInput) -> dict[str, Tensor]:
    engine._backward(micro, len(micro.variant_ids), last=True)
    named = engine.denoiser.named_parameters()
    return {name: weight.grad.clone() for name, weight in named if weight.grad is not None}


def test_the_scale_ends_with_the_micro_batch(make_project: Callable[..., Project]) -> None:
    job = slider_project(make_project, sizes={"64x64": 4}).job()
    engine = engine_of(job)
    before = scales_of(engine)
    for step in range(2):
        one_step(engine, job, step)
    assert scales_of(engine) == before


def scales_of(engine: Engine) -> list[float]:
    layers: list[Any] = [layer for _, layer in lora_modules(engine.denoiser)]
    return [layer.scaling[ADAPTER] for layer in layers]


def test_the_validation_loss_of_each_side_is_measured_at_its_scale(
    make_project: Callable[..., Project],
) -> None:
    datasets = {name: {"validation_fraction": 0.5} for name in ("bright", "dark")}
    project = slider_project(make_project, sizes={"64x64": 16}, datasets=datasets)
    job = project.job()
    engine = engine_of(job)
    for step in range(2):
        one_step(engine, job, step)
    held_out = job.inputs.held_out
    assert set(held_out.lora_scales) == {1, -1}
    measured = Validation(job, load_family(job.base), held_out).loss(engine).by_variant

    for scale in (1, -1):
        alone = TrainingInputs(held_out.table.filter(held_out.lora_scales == scale))
        plain = TrainingInputs(alone.table.with_columns(slider=pl.lit(1, pl.Int8)))
        at_scale_1 = replace(job, inputs=plain)
        with scaled_adapters(engine.networks, scale):
            expected = Validation(at_scale_1, load_family(job.base), plain).loss(engine).by_variant
        assert {name: measured[name] for name in expected} == pytest.approx(expected, rel=1e-4)
