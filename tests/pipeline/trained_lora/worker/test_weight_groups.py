"""Learning rates of modules and of up matrices decide the optimizer's groups and the size of its steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pipeline.errors import TrainingError
from pipeline.models.worker.family import load_family
from pipeline.recipe import LoraSettings
from pipeline.trained_lora.worker.adapter.lora import adapter_state, collect, trainable_weights
from pipeline.trained_lora.worker.engine import Engine
from pipeline.trained_lora.worker.loader import MicroBatchMaker
from pipeline.trained_lora.worker.optimizers import weight_groups

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

SGD = {"optimizer": "torch.optim.SGD", "learning_rate": 1.0, "max_grad_norm": 1e9}
PATTERNS = [
    {"modules": "*.attn2.to_k", "learning_rate": 0.2},
    {"modules": "*.attn2.*", "learning_rate": 0.4},
]


def engine_of(project: Project) -> Engine:
    job = project.job()
    return Engine(job, load_family(job.base))


def shapes(groups: Sequence[dict[str, Any]]) -> list[tuple[int, float | None]]:
    return [(len(group["params"]), group.get("lr")) for group in groups]


def updates(project: Project) -> dict[str, torch.Tensor]:
    """Return how one step changes each weight of a denoiser whose adapter is not zero."""
    job = project.job()
    family = load_family(job.base)
    engine = Engine(job, family)
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in trainable_weights(engine.denoiser):
            weight.copy_(0.3 * torch.randn(weight.shape, generator=rng))
    before = collect(engine.networks, adapter_state)
    maker = MicroBatchMaker(job, family, engine.noise_scheduler)
    batch = job.plan()[0]
    inputs = [(batch, maker.make(batch.step, micro[0])) for micro in batch.micro_batches]
    engine.step(batch, iter(inputs), stop=False)
    return {name: after - before[name] for name, after in collect(engine.networks, adapter_state).items()}


def test_without_settings_there_is_one_group_per_kind_of_network(
    make_project: Callable[..., Project],
) -> None:
    project = make_project()
    engine = engine_of(project)
    assert shapes(weight_groups(engine.networks, project.recipe.training)) == [(16, None)]
    text = project.changed("text", lora=_lora(project, text_encoders={"learning_rate": 1e-5}))
    engine = engine_of(text)
    groups = shapes(weight_groups(engine.networks, text.recipe.training))
    assert groups == [(16, None), (len(engine.weights) - 16, 1e-5)]


def test_rates_of_modules_are_rates_of_the_denoiser_only(make_project: Callable[..., Project]) -> None:
    project = make_project()
    every_module = [{"modules": "*", "learning_rate": 0.2}]
    lora = _lora(project, learning_rates=every_module, text_encoders={"learning_rate": 1e-5})
    project = project.changed("rates", lora=lora)
    engine = engine_of(project)
    groups = shapes(weight_groups(engine.networks, project.recipe.training))
    assert groups == [(16, 0.2), (len(engine.weights) - 16, 1e-5)]


def _lora(project: Project, **settings: Any) -> LoraSettings:
    values = project.recipe.training.lora.model_dump(mode="json")
    return LoraSettings.model_validate_json(json.dumps({**values, **settings}))


def test_each_weight_moves_by_the_rate_of_its_module_and_matrix(
    make_project: Callable[..., Project],
) -> None:
    """Plain gradient descent at rate r moves a weight r times as far as at rate 1."""
    plain = make_project(**SGD)
    expected = updates(plain)
    for ratio, num_factors in ((None, 3), (16.0, 6)):
        lora = _lora(plain, learning_rates=PATTERNS, loraplus_ratio=ratio)
        changed, factors = updates(plain.changed(f"ratio {ratio}", lora=lora)), set[float]()
        for name, update in expected.items():
            module = name.split(".lora_")[0]
            rates = (each["learning_rate"] for each in PATTERNS if fnmatchcase(module, each["modules"]))
            factor = next(rates, 1.0) * ((ratio or 1.0) if ".lora_B." in name else 1.0)
            factors.add(factor)
            assert float(update.abs().max()) > 0
            torch.testing.assert_close(changed[name], factor * update, rtol=1e-2, atol=5e-6)
        assert len(factors) == num_factors


def test_all_modules_may_have_their_own_rate_and_the_schedule_applies_to_them(
    make_project: Callable[..., Project],
) -> None:
    rates = [{"modules": "*", "learning_rate": 4e-3}]
    project = make_project(warmup_steps=4, **SGD)
    warm = updates(project.changed("warm", lora=_lora(project, learning_rates=rates)))
    assert all(not bool(update.any()) for update in warm.values()), "the rate rises from zero"


def test_a_pattern_that_matches_no_adapted_module_is_an_error(make_project: Callable[..., Project]) -> None:
    project = make_project()
    lora = _lora(project, learning_rates=[{"modules": "*.conv1", "learning_rate": 1e-3}])
    with pytest.raises(TrainingError, match=r"learning_rates: the pattern \*\.conv1 matches no layer"):
        engine_of(project.changed("wrong", lora=lora))
