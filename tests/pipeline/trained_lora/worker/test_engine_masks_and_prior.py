"""A loss weighted by masks, and the loss of prior images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, UNet2DConditionModel

from pipeline.cache.store import Store
from pipeline.recipe import LossSettings
from pipeline.trained_lora.inputs import TrainingInputs
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.worker.adapter.lora import adapter_state
from tests.pipeline.trained_lora.worker.engine_steps import (
    engine_of,
    gradients,
    inputs_of,
    losses_of,
    one_step,
)
from tests.tensor_differences import differing_tensors

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


def adapter_after_a_step(job: TrainingJob) -> dict[str, torch.Tensor]:
    """Return the adapter after one step."""
    engine = engine_of(job)
    batch = job.plan()[0]
    engine.step(batch, iter(inputs_of(job, engine, batch)), stop=False)
    return {name: weight.clone() for name, weight in adapter_state(engine.denoiser).items()}


def test_white_masks_train_the_same_weights_as_no_masks_bit_for_bit(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(datasets={"photos": {"mask": {"from": "alpha"}}})
    job = project.job()
    entries = [view.mask for item in job.inputs for view in item.views]
    store = Store(project.recipe.cache_dir)
    for spec in entries:
        assert spec is not None
        store.discard(spec)
        store.write(spec, {"mask": np.ones(spec.tensors["mask"].shape, dtype=np.float16)}, {})
    table = job.inputs.table.drop("masks", "mask_tensors")
    weights = [adapter_after_a_step(each) for each in (job, replace(job, inputs=TrainingInputs(table)))]
    assert weights[0].keys() == weights[1].keys()
    assert differing_tensors(weights[0], weights[1]) == []


def test_masks_change_what_is_trained(make_project: Callable[..., Project]) -> None:
    job = make_project(datasets={"photos": {"mask": {"from": "alpha"}}}).job()
    table = job.inputs.table.drop("masks", "mask_tensors")
    masked, plain = (adapter_after_a_step(each) for each in (job, replace(job, inputs=TrainingInputs(table))))
    assert differing_tensors(masked, plain), "the masks must change weights"


def test_the_prior_loss_outside_a_mask_is_zero_at_step_0_and_then_that_computed_by_hand(
    make_project: Callable[..., Project],
) -> None:
    settings: dict[str, Any] = {"gradient_accumulation": 1, "sizes": {"64x64": 8}}
    masks = {"from": "alpha", "unmasked_weight": 0.1}
    job = make_project(datasets={"photos": {"mask": {**masks, "prior_weight": 0.5}}}, **settings).job()
    (dataset,) = job.recipe.datasets
    assert dataset.mask is not None
    without = dataset.model_copy(update={"mask": dataset.mask.model_copy(update={"prior_weight": 0.0})})
    plain = replace(job, recipe=job.recipe.model_copy(update={"datasets": (without,)}))

    engine = engine_of(job)
    assert losses_of(engine, job, 0) == losses_of(engine, plain, 0)
    for step in range(2):
        one_step(engine, job, step)
    ((_, micro),) = inputs_of(job, engine, job.plan()[2])
    assert micro.prior_place_weights is not None
    unet = UNet2DConditionModel.from_pretrained(job.base / "unet")
    scheduler = DDPMScheduler.from_pretrained(job.base / "scheduler")
    noisy = scheduler.add_noise(micro.latent, micro.input_noise, micro.timesteps)
    text = micro.conditions["text_embedding"]
    with torch.no_grad():
        adapted = engine.denoiser(noisy, micro.timesteps, text).sample
        base = unet(noisy, micro.timesteps, text).sample
    expected = (micro.prior_place_weights * (adapted - base) ** 2).mean(dim=(1, 2, 3))
    assert bool((expected > 0).all())
    added = [
        losses_of(engine, job, 2)[name] - losses_of(engine, plain, 2)[name] for name in micro.variant_ids
    ]
    torch.testing.assert_close(torch.tensor(added), expected, rtol=1e-3, atol=1e-7)


PRIOR = {"photos": {}, "class": {"role": "prior"}}
"""A dataset of the subject, and one of its class."""


@pytest.mark.parametrize("init", ["kaiming", "pissa"])
def test_the_loss_of_the_prior_prediction_is_zero_at_step_0(
    make_project: Callable[..., Project], init: str
) -> None:
    lora = {"rank": 4, "alpha": 2.0, "init": init}
    job = make_project(datasets=PRIOR, loss={"prior": "prediction"}, lora=lora).job()
    engine = engine_of(job)
    losses = {name: loss for step in range(3) for name, loss in losses_of(engine, job, step).items()}
    assert {name.split("/")[0] for name in losses} == set(PRIOR)
    wrong = {name: loss for name, loss in losses.items() if (loss == 0.0) != name.startswith("class/")}
    assert wrong == {}, "only losses of the class must be zero"


def test_the_prior_prediction_is_that_of_the_base_model_computed_by_hand(
    make_project: Callable[..., Project],
) -> None:
    settings: dict[str, Any] = {"loss": {"prior": "prediction"}, "gradient_accumulation": 1}
    job = make_project(datasets=PRIOR, batch_size=4, sizes={"64x64": 8}, **settings).job()
    engine = engine_of(job)
    for step in range(2):
        one_step(engine, job, step)
    unet = UNet2DConditionModel.from_pretrained(job.base / "unet")
    scheduler = DDPMScheduler.from_pretrained(job.base / "scheduler")

    ((_, micro),) = inputs_of(job, engine, job.plan()[2])
    assert micro.is_prior is not None
    assert 0 < int(micro.is_prior.sum()) < len(micro.is_prior)
    noisy = scheduler.add_noise(micro.latent, micro.input_noise, micro.timesteps)
    text = micro.conditions["text_embedding"]
    with torch.no_grad():
        losses = engine.objective.losses(micro, engine.denoiser)
        adapted = engine.denoiser(noisy, micro.timesteps, text).sample
        base = unet(noisy, micro.timesteps, text).sample
    for number, is_prior in enumerate(micro.is_prior):
        target = base[number] if is_prior else micro.noise[number]
        expected = ((adapted[number] - target) ** 2).mean()
        torch.testing.assert_close(losses[number], expected, rtol=1e-4, atol=1e-9)
        assert losses[number] > 0


def test_prior_images_have_their_own_target_by_default(make_project: Callable[..., Project]) -> None:
    project = make_project(datasets=PRIOR)
    plain = project.recipe.model_copy(
        update={
            "datasets": tuple(each.model_copy(update={"role": "train"}) for each in project.recipe.datasets)
        }
    )
    job = project.job()
    engine = engine_of(job)
    as_train = replace(job, recipe=plain)
    assert losses_of(engine, job, 0) == losses_of(engine, as_train, 0)


def test_the_prior_weight_multiplies_the_gradient_of_prior_images(
    make_project: Callable[..., Project],
) -> None:
    single: dict[str, Any] = {
        "datasets": {"class": {"role": "prior"}, "photos": {}},
        "gradient_accumulation": 1,
    }
    project = make_project(sizes={"64x64": 2}, batch_size=1, **single)
    job = project.job()
    number = next(
        step.step for step in job.plan() if next(iter(step.slots())).variant_id.startswith("class/")
    )
    halved = project.changed("halved", loss=LossSettings(prior_weight=0.5)).job()
    full, half = gradients(job, number), gradients(halved, number)
    assert max(float(gradient.abs().max()) for gradient in full.values()) > 0
    for name, gradient in full.items():
        torch.testing.assert_close(half[name], gradient / 2)
