"""Losses of the base model against diffusers' own calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pipeline.cache.entry_format import LATENT, TEXT
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.diagnosis.caption_swap import positions
from pipeline.diagnosis.entries import swapped_inputs
from pipeline.diagnosis.worker.measure import BaseLosses
from pipeline.recipe.diagnosis import DiagnosisSettings
from pipeline.trained_lora.inputs import TrainingInputs
from pipeline.trained_lora.plan.random_streams import stream
from tests.pipeline.trained_lora.conftest import any_precision, one_thread

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

__all__ = ["any_precision", "one_thread"]


MASK = {"from": "alpha", "unmasked_weight": 0.25, "normalise": False}


@pytest.mark.parametrize(
    ("prediction", "dataset"), [("epsilon", {}), ("v_prediction", {"mask": MASK})], ids=["plain", "masked"]
)
def test_the_losses_equal_those_of_diffusers(
    make_project: Callable[..., Project],
    tiny_bases: dict[str, Path],
    prediction: str,
    dataset: dict[str, Any],
) -> None:
    """With the mean squared error of the noise or the velocity, and one noise for all captions of a draw.

    A mask weights the errors, because a caption may describe only what is trained on.
    """
    from diffusers import DDPMScheduler, UNet2DConditionModel

    project = make_project(prediction=prediction, datasets={"photos": dataset})
    entries = RecipeEntries(project.recipe)
    inputs = swapped_inputs(entries, project.latents, project.text)
    job = replace(project.job(), inputs=TrainingInputs(inputs))
    base = BaseLosses(job.recipe, job.base, {})
    item = job.inputs[3]
    measured = base.losses(base.batches(job), item.variant_id, [2, 0], [0, 3, 1])

    folder = tiny_bases[prediction]
    unet: Any = UNet2DConditionModel.from_pretrained(folder, subfolder="unet")
    scheduler: Any = DDPMScheduler.from_pretrained(folder, subfolder="scheduler")
    latent = torch.from_numpy(entries.store.read(item.views[0].entry)[LATENT]).float()[None]
    weights = torch.ones(())
    if mask := item.views[0].mask:
        inside = torch.from_numpy(entries.store.read(mask)["mask"]).float()
        weights = 0.25 + 0.75 * inside
        assert 0 < inside.mean() < 1
    expected = np.zeros((2, 3))
    for row, draw in enumerate([2, 0]):
        level = positions()[draw]
        noise = _noise(item.identity, level, latent)
        timestep = torch.tensor([int(level * scheduler.config.num_train_timesteps)])
        target = noise if prediction == "epsilon" else scheduler.get_velocity(latent, noise, timestep)
        noisy = scheduler.add_noise(latent, noise, timestep)
        for column, caption in enumerate([0, 3, 1]):
            text = torch.from_numpy(entries.store.read(item.variants[caption].entry)[TEXT]).float()[None]
            with torch.no_grad():
                output = unet(noisy, timestep, text).sample
            expected[row, column] = float((weights * (output - target) ** 2).mean())
    np.testing.assert_allclose(measured, expected, rtol=1e-4)


def test_the_changes_to_first_order_equal_those_of_diffusers(
    make_project: Callable[..., Project], tiny_bases: dict[str, Path]
) -> None:
    from diffusers import DDPMScheduler, UNet2DConditionModel

    project = make_project()
    entries = RecipeEntries(project.recipe)
    inputs = swapped_inputs(entries, project.latents, project.text)
    recipe = project.recipe.model_copy(update={"diagnosis": DiagnosisSettings(others=3)})
    job = replace(project.job(), recipe=recipe, inputs=TrainingInputs(inputs))
    base = BaseLosses(job.recipe, job.base, {})
    item = job.inputs[3]
    changes = base.changes(base.batches(job), item.variant_id, 4)

    folder = tiny_bases["epsilon"]
    unet: Any = UNet2DConditionModel.from_pretrained(folder, subfolder="unet")
    scheduler: Any = DDPMScheduler.from_pretrained(folder, subfolder="scheduler")
    latent = torch.from_numpy(entries.store.read(item.views[0].entry)[LATENT]).float()[None]
    noise = _noise(item.identity, positions()[0], latent)
    timestep = torch.tensor([int(positions()[0] * scheduler.config.num_train_timesteps)])
    texts = [
        torch.from_numpy(entries.store.read(each.entry)[TEXT]).float()[None] for each in item.variants[:4]
    ]
    own = texts[0].clone().requires_grad_()
    loss = ((unet(scheduler.add_noise(latent, noise, timestep), timestep, own).sample - noise) ** 2).mean()
    loss.backward()
    assert own.grad is not None
    expected = [float((own.grad * (text - texts[0])).sum()) for text in texts]
    np.testing.assert_allclose(changes, expected, rtol=1e-3, atol=1e-7)


def _noise(identity: str, level: float, latent: torch.Tensor) -> torch.Tensor:
    shape = tuple(latent.shape[1:])
    values = stream("fixed noise", identity, str(level)).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(values)[None]
