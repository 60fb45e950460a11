from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from peft import LoraConfig

from pipeline.cache.store import Store
from pipeline.cache.worker.tensors import read_torch
from pipeline.errors import TrainingError
from pipeline.models.worker.family import load_family
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.worker.adapter.lora import adapter_state
from pipeline.trained_lora.worker.engine import Engine
from pipeline.trained_lora.worker.loader import MicroBatchMaker
from pipeline.trained_lora.worker.micro_input import MicroInput
from tests.pipeline.trained_lora.project import ALL_MODULES
from tests.pipeline.trained_lora.worker.engine_steps import (
    engine_of,
    gradients,
    inputs_of,
    one_step,
)
from tests.pipeline.trained_lora.worker.fp16 import with_loss_scaling
from tests.tensor_differences import differing_tensors

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

CHANGED_NOISE = {"offset": 0.3, "input_perturbation": 0.5}
"""Settings with which the noise of the target differs from that of the input."""


@pytest.mark.parametrize(
    ("prediction", "noise"),
    [("epsilon", {}), ("epsilon", CHANGED_NOISE), ("v_prediction", CHANGED_NOISE)],
    ids=["epsilon", "epsilon with perturbed input", "v_prediction with perturbed input"],
)
def test_one_step_equals_an_independent_step_with_diffusers(
    make_project: Callable[..., Project], prediction: str, noise: dict[str, float]
) -> None:
    settings = {"gradient_accumulation": 1, "steps": 3, "max_grad_norm": 0.05, "noise": noise}
    project = make_project(prediction=prediction, lora=ALL_MODULES, **settings)
    job = project.job()
    engine = engine_of(job)
    batch = job.plan()[0]
    inputs = inputs_of(job, engine, batch)
    micro = inputs[0][1]
    before = adapter_state(engine.denoiser)
    outcome = engine.step(batch, iter(inputs), stop=False)

    unet = UNet2DConditionModel.from_pretrained(job.base / "unet")
    unet.requires_grad_(False)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    unet.add_adapter(LoraConfig(r=4, lora_alpha=2, target_modules=targets))
    weights = {name: weight for name, weight in unet.named_parameters() if weight.requires_grad}
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(before[name.replace(".default.", ".")])
    ddpm = DDPMScheduler.from_pretrained(job.base / "scheduler")
    signal = ddpm.alphas_cumprod[micro.timesteps].view(-1, 1, 1, 1)
    same_noise = torch.equal(micro.input_noise, micro.noise)
    assert same_noise == (not noise), f"input_noise equals noise: {same_noise}, with the settings {noise}"
    noisy = signal.sqrt() * micro.latent + (1 - signal).sqrt() * micro.input_noise
    velocity = signal.sqrt() * micro.noise - (1 - signal).sqrt() * micro.latent
    goal = micro.noise if prediction == "epsilon" else velocity
    answer = unet(noisy, micro.timesteps, micro.conditions["text_embedding"]).sample
    loss = ((answer - goal) ** 2).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(weights.values(), 0.05)
    torch.optim.AdamW(weights.values(), lr=1e-2).step()

    step = f"{prediction}, noise {noise}: the input is mixed with input_noise, the target is from noise"
    assert outcome.loss == pytest.approx(loss.item(), rel=1e-5), f"loss of {step}"
    assert outcome.grad_norm == pytest.approx(norm.item(), rel=1e-4), f"gradient norm of {step}"
    after = adapter_state(engine.denoiser)
    for name, weight in weights.items():
        torch.testing.assert_close(after[name.replace(".default.", ".")], weight.data, rtol=1e-4, atol=1e-6)
    assert differing_tensors(after, before), "the step must change weights"


def test_R03_accumulating_four_batches_of_two_gives_the_gradient_of_one_batch_of_eight(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(sizes={"64x64": 11}, steps=2, batch_size=8, gradient_accumulation=1)
    windows = project.changed("windows", batch_size=2, gradient_accumulation=4).job()
    large = project.job()
    assert [step.num_samples for step in large.plan()] == [8, 3]
    for step in (0, 1):
        one, many = gradients(large, step), gradients(windows, step)
        assert set(one) == set(many)
        assert max(float(gradient.abs().max()) for gradient in one.values()) > 0
        for name, gradient in one.items():
            torch.testing.assert_close(many[name], gradient, rtol=1e-3, atol=1e-7)


def test_a_placeholder_of_weight_zero_does_not_change_the_gradient(
    make_project: Callable[..., Project],
) -> None:
    job = make_project(sizes={"64x64": 1}, steps=1).job()
    engine = engine_of(job)
    batch = job.plan()[0]
    ((_, micro),) = inputs_of(job, engine, batch)
    engine._backward(micro, 1, last=True)
    alone = [weight.grad.clone() for weight in engine.weights if weight.grad is not None]
    engine._backward(MicroInput(**{**vars(micro), "weights": torch.zeros(1)}), 1, last=True)
    both = [weight.grad for weight in engine.weights if weight.grad is not None]
    assert differing_tensors(alone, both) == []


def test_a_loss_weight_multiplies_the_gradient_of_its_dataset_and_not_the_reported_losses(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(
        sizes={"64x64": 4}, batch_size=4, gradient_accumulation=1, datasets={"one": {}, "two": {}}
    )
    plain = project.job()
    weights = {"one": 0.25, "two": 3.0}
    datasets = tuple(
        each.model_copy(update={"loss_weight": weights[each.name]}) for each in plain.recipe.datasets
    )
    weighted = replace(plain, recipe=plain.recipe.model_copy(update={"datasets": datasets}))
    engine, batch = engine_of(plain), plain.plan()[0]
    ((_, micro),) = inputs_of(plain, engine, batch)
    ((_, own),) = inputs_of(weighted, engine, batch)
    expected_weights = [weights[each.partition("/")[0]] for each in micro.variant_ids]
    assert set(expected_weights) == {0.25, 3.0}
    assert own.loss_weights.tolist() == expected_weights
    assert micro.loss_weights.tolist() == [1.0] * 4

    losses = engine.objective.losses(micro, engine.denoiser)
    (losses * torch.tensor(expected_weights)).mean().backward()
    expected = [weight.grad for weight in engine.weights]
    for weight in engine.weights:
        weight.grad = None
    reported = engine._backward(own, 4, last=True)
    assert torch.equal(reported, losses.detach())
    for weight, gradient in zip(engine.weights, expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-4, atol=1e-8)


@pytest.mark.usefixtures("any_precision")
def test_dropout_differs_between_ranks_and_steps_and_repeats_with_the_seed(
    make_project: Callable[..., Project],
) -> None:
    """With equal inputs, only the masks can make the gradients of two ranks or steps differ.

    The masks of a step never change, because runs resume with a newer version of the code.
    """
    project = make_project(steps=3, gradient_accumulation=1, lora={"rank": 4, "alpha": 2.0, "dropout": 0.5})
    job = project.job()
    batch = job.plan()[0]
    micro = inputs_of(job, engine_of(job), batch)[0][1]

    def gradient_norm(*, rank: int, step: int, seed: int = 7) -> float:
        engine = engine_of(project.changed("other", seed=seed).job())
        weights = adapter_state(engine_of(job).denoiser)
        for name, weight in engine.denoiser.named_parameters():
            if weight.requires_grad:
                weight.data.copy_(weights[name.replace(".default.", ".")])
        engine.accelerator.state.process_index = rank
        planned = replace(batch, step=step)
        return engine.step(planned, iter([(planned, micro)]), stop=False).grad_norm

    first = gradient_norm(rank=0, step=0)
    assert first == pytest.approx(0.0115460, rel=1e-3)
    assert gradient_norm(rank=0, step=0) == first, "the same seed, step and rank give other masks"
    for difference in ({"rank": 1, "step": 0}, {"rank": 0, "step": 1}, {"rank": 0, "step": 0, "seed": 8}):
        assert gradient_norm(**difference) != first, f"{difference} gives the masks of rank 0 in step 0"


def test_R05_a_nan_loss_is_an_error_that_names_the_sample_and_keeps_the_weights(
    make_project: Callable[..., Project],
) -> None:
    job = make_project(steps=2, gradient_accumulation=1).job()
    engine = engine_of(job)
    batch = job.plan()[0]
    ((_, micro),) = inputs_of(job, engine, batch)
    micro.latent[1] = math.nan
    before = adapter_state(engine.denoiser)
    with pytest.raises(TrainingError, match="loss of step 0 must be finite, got nan") as excinfo:
        engine.step(batch, iter([(batch, micro)]), stop=False)
    assert micro.variant_ids[1] in excinfo.value.where
    assert micro.variant_ids[0] not in excinfo.value.where
    after = adapter_state(engine.denoiser)
    assert differing_tensors(before, after) == []


@pytest.mark.usefixtures("any_precision")
def test_R05_a_step_skipped_by_loss_scaling_is_not_averaged_and_the_rate_stays_as_planned(
    make_project: Callable[..., Project],
) -> None:
    settings: dict[str, Any] = {"steps": 4, "ema_decay": 0.5, "lr_scheduler": "linear"}
    job = make_project(gradient_accumulation=1, **settings).job()
    engine = with_loss_scaling(engine_of(job))
    out_of_memory_error = engine.weights[0].register_hook(lambda gradient: gradient + math.inf)
    outcomes = [one_step(engine, job, step) for step in (0, 1)]
    out_of_memory_error.remove()
    outcomes += [one_step(engine, job, step) for step in (2, 3)]
    assert [math.isfinite(outcome.grad_norm) for outcome in outcomes] == [False, False, True, True]
    assert engine.state(4).optimizer["ema"]["optimization_step"] == 2
    rates = [outcome.learning_rate for outcome in outcomes]
    assert rates == pytest.approx([1e-2 * (1 - step / 4) for step in range(4)])


@pytest.mark.usefixtures("any_precision")
def test_R05_a_run_whose_steps_are_all_skipped_stops_with_an_error(
    make_project: Callable[..., Project],
) -> None:
    job = make_project(steps=40, gradient_accumulation=1, batch_size=1).job()
    engine = with_loss_scaling(engine_of(job))
    one_step(engine, job, 0)
    before = adapter_state(engine.denoiser)
    engine.weights[0].register_hook(lambda gradient: gradient + math.inf)
    for step in range(1, 20):
        one_step(engine, job, step)
    with pytest.raises(
        TrainingError, match="fp16 loss scaling skipped the last 20 steps, up to step 20"
    ) as excinfo:
        one_step(engine, job, 20)
    assert "bf16" in excinfo.value.fix
    assert differing_tensors(adapter_state(engine.denoiser), before) == []


@pytest.mark.usefixtures("any_precision")
def test_R10_trained_weights_are_float32_and_the_bfloat16_base_does_not_change(
    make_project: Callable[..., Project],
) -> None:
    job = make_project(steps=1).changed("half", mixed_precision="bf16").job()
    engine = engine_of(job)
    frozen = {name: weight for name, weight in engine.denoiser.named_parameters() if not weight.requires_grad}
    before = {name: weight.clone() for name, weight in frozen.items()}
    batch = job.plan()[0]
    outcome = engine.step(batch, iter(inputs_of(job, engine, batch)), stop=False)
    assert math.isfinite(outcome.loss)
    assert {weight.dtype for weight in engine.weights} == {torch.float32}
    assert {weight.dtype for weight in frozen.values()} == {torch.bfloat16}
    assert differing_tensors(frozen, before) == []


def test_a_slot_s_noise_depends_only_on_seed_step_and_slot(make_project: Callable[..., Project]) -> None:
    project = make_project(sizes={"64x64": 8}, steps=2, batch_size=4, gradient_accumulation=1)
    job = project.job()
    family = load_family(job.base)
    maker = MicroBatchMaker(job, family, family.noise.load_scheduler())
    share = job.plan()[0].micro_batches[0][0]
    together = maker.make(0, share)
    alone = [maker.make(0, (slot,)) for slot in share]
    assert torch.equal(together.noise, torch.cat([micro.noise for micro in alone]))
    assert torch.equal(together.timesteps, torch.cat([micro.timesteps for micro in alone]))
    later = maker.make(1, share)
    assert not torch.equal(together.noise, later.noise)
    assert torch.equal(together.latent, later.latent)


def test_dropped_captions_are_replaced_by_the_empty_caption(make_project: Callable[..., Project]) -> None:
    job = make_project(dropout=1.0).job()
    family = load_family(job.base)
    maker = MicroBatchMaker(job, family, family.noise.load_scheduler())
    micro = maker.make(0, job.plan()[0].micro_batches[0][0])
    empty = read_torch(Store(job.recipe.cache_dir), job.empty_text)["text_embedding"]
    rows = micro.conditions["text_embedding"]
    assert differing_tensors(rows, [empty] * len(rows)) == []


def _steps(job: TrainingJob, engine: Engine) -> Iterator[float]:
    for _, batch in job.plan().iterate():
        yield engine.step(batch, iter(inputs_of(job, engine, batch)), stop=False).learning_rate


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [("constant", [0, 0.5, 1, 1, 1, 1]), ("linear", [0, 0.5, 1, 0.75, 0.5, 0.25])],
    ids=["constant", "linear"],
)
def test_R04_the_schedule_is_stepped_once_per_optimizer_step(
    make_project: Callable[..., Project], schedule: str, rates: list[float]
) -> None:
    job = make_project(lr_scheduler=schedule, warmup_steps=2, learning_rate=1e-3).job()
    used = list(_steps(job, engine_of(job)))
    assert used == pytest.approx([1e-3 * rate for rate in rates])


def test_an_evaluation_has_neither_dropout_nor_gradients_and_training_continues_afterwards(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(steps=1, lora={"rank": 4, "alpha": 2.0, "dropout": 0.5})
    job = project.job()
    engine = engine_of(job)
    ((_, micro), *_) = inputs_of(job, engine, job.plan()[0])
    with torch.no_grad():
        for weight in engine.weights:
            weight.add_(0.1)

    losses: list[torch.Tensor] = []
    with suppress(RuntimeError), engine.objective.evaluation():
        losses += [engine.objective.losses(micro, engine.denoiser) for _ in range(2)]
        raise RuntimeError("ends early")
    assert torch.equal(*losses)
    assert not losses[0].requires_grad
    assert all(network.training for network in engine.networks.values())

    trained = [engine.objective.losses(micro, engine.denoiser) for _ in range(2)]
    assert not torch.equal(*trained), "dropout is random in training"
    assert trained[0].requires_grad
    assert engine.embed_caption("a cat") is None, "no text encoder is trained"
    assert engine.is_sharded is False
