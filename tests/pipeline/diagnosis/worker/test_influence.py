"""Influences against finite differences of the losses that training and validation compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from pipeline.diagnosis.influence import fork_without
from pipeline.diagnosis.worker.influence import Influences, product
from pipeline.models.worker.family import load_family
from pipeline.trained_lora.worker.engine import Engine
from pipeline.trained_lora.worker.validation import Validation
from tests.pipeline.trained_lora.conftest import any_precision, one_thread
from tests.pipeline.trained_lora.worker.engine_steps import inputs_of, one_step

if TYPE_CHECKING:
    from pipeline.recipe import Recipe
    from tests.pipeline.trained_lora.project import Project

__all__ = ["any_precision", "one_thread"]

STEPS = 3


def moved(engine: Engine, direction: Sequence[Tensor], length: float) -> None:
    with torch.no_grad():
        for weight, each in zip(engine.weights, direction, strict=True):
            weight.add_(each, alpha=length)


@pytest.fixture
def project(make_project: Callable[..., Project]) -> Project:
    return make_project(
        datasets={"photos": {"validation_fraction": 0.3, "loss_weight": 2.0}}, steps=STEPS, dropout=0.0
    )


def test_an_influence_predicts_what_a_step_on_the_image_does_to_the_held_out_loss(project: Project) -> None:
    job = project.job()
    family = load_family(job.base)
    engine = Engine(job, family)
    for step in range(STEPS):
        one_step(engine, job, step)
    state = engine.state(STEPS)

    influences = Influences(job, family, engine)
    influences.restore(state)
    name = job.inputs.trained.table["variant_id"][0]
    gradient = influences.gradient(name)
    validation = Validation(job, family, job.inputs.held_out)
    length = 0.02 / product(gradient, gradient) ** 0.5
    after: list[float] = []
    for sign in (1.0, -1.0):
        moved(engine, gradient, sign * length)
        after.append(validation.loss(engine).mean)
        moved(engine, gradient, -sign * length)
    slope = (after[0] - after[1]) / (2 * length)
    assert product(gradient, influences.held_out) == pytest.approx(slope, rel=0.05, abs=1e-6)

    # Adam moves each weight by its gradient, divided by the root of the second moment.
    moments = state.optimizer["optimizer"]["state"]
    correction = 1 - 0.999**STEPS
    for index, (direction, held_out) in enumerate(
        zip(influences.direction, influences.held_out, strict=True)
    ):
        root = (moments[index]["exp_avg_sq"] / correction).sqrt() + 1e-8
        assert torch.allclose(direction, held_out / root)
    assert influences.of(name) == pytest.approx(product(gradient, influences.direction), rel=1e-4)


def test_the_gradient_is_of_the_training_loss_with_the_weight_of_its_dataset(project: Project) -> None:
    plain = replace(project, recipe=_weighted(project, 1.0))
    gradients: list[list[Tensor]] = []
    for each in (project, plain):
        job = each.job()
        family = load_family(job.base)
        engine = Engine(job, family)
        # The LoRA's second matrix begins at zero, with which the first one has no gradient.
        moved(engine, [torch.ones_like(weight) for weight in engine.weights], 0.01)
        gradients.append(Influences(job, family, engine).gradient(job.inputs.trained[0].variant_id))
    for weighted, own in zip(*gradients, strict=True):
        assert torch.allclose(weighted, 2 * own, rtol=1e-4)


def test_a_training_does_not_depend_on_the_images_that_it_leaves_out(project: Project) -> None:
    """With any pixels in their place, it has the same weights; with nobody left out, those of the run."""
    job = project.job()
    sample = next(iter(job.plan()[0].slots())).variant_id
    weights: list[list[Tensor]] = []
    for left_out, changed in (([sample], False), ([sample], True), ([], False), ([], True)):
        fork = fork_without(job, left_out, 0)
        engine = Engine(fork, load_family(fork.base))
        batch = fork.plan()[0]
        inputs = [
            (
                step,
                replace(
                    micro,
                    latent=torch.stack(
                        [
                            latent + 3.0 if changed and name == sample else latent
                            for name, latent in zip(micro.variant_ids, micro.latent, strict=True)
                        ]
                    ),
                ),
            )
            for step, micro in inputs_of(fork, engine, batch)
        ]
        engine.step(batch, iter(inputs), stop=False)
        weights.append([weight.detach().clone() for weight in engine.weights])

    engine = Engine(job, load_family(job.base))
    one_step(engine, job, 0)
    without, without_changed, complete, complete_changed = weights
    assert _equal(without, without_changed)
    assert _equal(complete, engine.weights)
    assert not _equal(complete, complete_changed)
    assert not _equal(without, complete)


def _equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def _weighted(project: Project, weight: float) -> Recipe:
    datasets = [each.model_copy(update={"loss_weight": weight}) for each in project.recipe.datasets]
    return project.recipe.model_copy(update={"datasets": datasets})
