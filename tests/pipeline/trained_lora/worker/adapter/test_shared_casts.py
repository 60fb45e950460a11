from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.images.geometry import Size
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.recipe import LoraSettings
from pipeline.trained_lora.identities import by_content
from pipeline.trained_lora.worker.adapter.lora import add_lora, lora_modules, trainable_weights
from pipeline.trained_lora.worker.adapter.shared_casts import share_casts
from tests.pipeline.trained_lora.project import Project
from tests.pipeline.trained_lora.worker.cuda_autocast import ImitatedCudaAutocast
from tests.pipeline.trained_lora.worker.engine_steps import engine_of, inputs_of
from tests.tiny_models import TinyModel

KINDS = [
    "Stable Diffusion XL",
    "FLUX.1 dev",
    "FLUX.2 klein",
    "Qwen-Image",
]


class Casts(TorchDispatchMode):
    """Counts the casts of float32 tensors to bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_cast = func is torch.ops.aten._to_copy.default
        self.count += is_cast and args[0].dtype == torch.float32 and result.dtype == torch.bfloat16
        return result


def adapted(family: WorkerFamily, settings: LoraSettings | None = None) -> nn.Module:
    """Return the denoiser in bfloat16 with an adapter that changes its output."""
    denoiser = family.denoiser.load("bfloat16", "cpu")
    add_lora(cast("Any", denoiser), settings or LoraSettings(rank=4), targets=family.lora_targets(), seed=1)
    draw = torch.Generator().manual_seed(3)
    for name, weight in denoiser.named_parameters():
        if "lora_B" in name:
            weight.data = torch.randn(weight.shape, generator=draw) / 16
    return denoiser.train()


def conditions_of(family: WorkerFamily) -> dict[str, Any]:
    """Return the conditions of two samples with captions of different lengths."""
    encoders = family.text.load("float32", "cpu")
    texts = [family.text.encode_caption(encoders, caption).tensors for caption in ("a cat", "a white cat")]
    sizes = {name: torch.tensor([(64, 64)] * 2) for name in ("original_size_hw", "target_size_hw")}
    return {**family.text.stack(texts), **sizes, "crop_top_left": torch.zeros(2, 2)}


def predict(family: WorkerFamily, denoiser: nn.Module, conditions: dict[str, Any], seed: int = 0) -> Tensor:
    """Return the prediction for two samples of noise."""
    shape = family.latent_shape(Size(64, 64))
    levels = torch.tensor([0.3, 0.7], dtype=torch.float64)
    timesteps = family.noise.timesteps(family.noise.load_scheduler(), levels, shape)
    noisy = torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed))
    return family.denoiser.predict(denoiser, noisy, timesteps, conditions)


def gradient(
    denoiser: nn.Module, rules: AbstractContextManager[Any], predicted: Callable[[], Tensor]
) -> Tensor:
    """Return the gradients of all trained weights in one row, float64."""
    weights = trainable_weights(denoiser)
    for weight in weights:
        weight.grad = None
    with rules:
        prediction = predicted()
    prediction.float().square().mean().backward()
    return torch.cat([cast("Tensor", weight.grad).flatten() for weight in weights]).double()


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_are_the_same_bits_with_fewer_casts(tiny_model: TinyModel, kind: str) -> None:
    family = load_family(tiny_model(kind))
    denoiser, conditions = adapted(family), conditions_of(family)
    predictions: list[Tensor] = []
    casts: list[int] = []
    for is_shared in (False, True):
        if is_shared:
            share_casts(denoiser, torch.bfloat16)
        with Casts() as counted, ImitatedCudaAutocast():
            predictions.append(predict(family, denoiser, conditions).detach())
        casts.append(counted.count)
    assert torch.equal(*predictions)
    assert casts[1] < casts[0], f"casts before and after: {casts}"


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_as_close_to_float32_as_without_shared_casts(tiny_model: TinyModel, kind: str) -> None:
    family = load_family(tiny_model(kind))
    separate, conditions = adapted(family), conditions_of(family)
    exact, shared = copy.deepcopy(separate).float(), copy.deepcopy(separate)
    share_casts(shared, torch.bfloat16)
    errors = torch.zeros(2)
    for seed in range(2):
        expected = gradient(exact, nullcontext(), partial(predict, family, exact, conditions, seed))
        for index, denoiser in enumerate((separate, shared)):
            predicted = partial(predict, family, denoiser, conditions, seed)
            difference = gradient(denoiser, ImitatedCudaAutocast(), predicted) - expected
            errors[index] += float(difference.norm() / expected.norm())
    assert errors[1] < 1.05 * errors[0], f"errors with separate and shared casts: {errors.tolist()}"


@pytest.mark.usefixtures("any_precision")
@pytest.mark.parametrize(
    ("precision", "is_former", "shares"), [("bf16", False, True), ("bf16", True, False), ("no", False, False)]
)
def test_queries_keys_and_values_share_their_input_in_new_runs_of_mixed_precision(
    make_project: Callable[..., Project], precision: str, *, is_former: bool, shares: bool
) -> None:
    """Runs of 0.3.0 and earlier, whose inputs are ordered by name, are resumed as they began."""
    project = make_project(lora={"rank": 4}).changed("other", mixed_precision=precision)
    job = project.job()
    if not is_former:
        job = replace(job, inputs=by_content(job.inputs, project.recipe, project.latents))
    engine = engine_of(job)
    inputs: dict[str, Tensor] = {}
    for name, layer in lora_modules(engine.denoiser):
        if ".attn1.to_" in name and "to_out" not in name:
            base: nn.Module = cast("Any", layer).get_base_layer()
            base.register_forward_hook(
                lambda _layer, args, _output, name=name: inputs.update({name: args[0]})
            )
    _, micro = inputs_of(job, engine, job.plan()[0])[0]
    with ImitatedCudaAutocast() if precision == "bf16" else nullcontext():
        engine.objective.losses(micro, engine.denoiser)

    queries = {name: tensor for name, tensor in inputs.items() if name.endswith("to_q")}
    assert len(queries) > 1
    for name, query in queries.items():
        key, value = (inputs[name.removesuffix("to_q") + each] for each in ("to_k", "to_v"))
        assert query.dtype == (torch.bfloat16 if shares else torch.float32)
        assert query is key is value
