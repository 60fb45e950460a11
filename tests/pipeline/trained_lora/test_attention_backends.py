from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from demo.tiny_models import TINY
from pipeline.errors import RecipeError, TrainingError
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.recipe import LoraSettings, Recipe, recipe_from_mapping
from pipeline.trained_lora.attention_backends import refuse_variable, require_attention_backend
from pipeline.trained_lora.worker.adapter.lora import add_lora, trainable_weights
from pipeline.trained_lora.worker.base_model import load_base
from tests.pipeline.models.families.test_gradients import backward
from tests.tiny_models import TinyModel

# diffusers' Chroma imports a class from a deprecated path; its ChatGLM calls a deprecated function of torch.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _default_backend() -> Iterator[None]:
    """Restore diffusers' backend of this process after the test."""
    with cast("Any", attention_backend)("native"):
        yield


class Kernels(TorchFunctionMode):
    """Records whether torch's fused attention was disabled in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.only_math: set[bool] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            self.only_math.add(not torch.backends.cuda.flash_sdp_enabled())
        return func(*args, **(kwargs or {}))


def recipe(family: WorkerFamily, backend: str) -> Recipe:
    return recipe_from_mapping(
        "demo",
        {
            "datasets": [{"name": "photos", "path": "photos"}],
            "output_dir": "out",
            "model": {"base": str(family.model.path)},
            "training": {"attention_backend": backend},
            "accelerate": {"mixed_precision": "no"},
        },
    )


def is_refused(family: WorkerFamily, backend: str) -> bool:
    try:
        require_attention_backend(recipe(family, backend).training, family)
    except TrainingError:
        return True
    return False


def adapter_gradients(family: WorkerFamily, backend: str) -> tuple[torch.Tensor, set[bool]]:
    """Return the gradients of an adapter, and whether attention used torch's plain kernel only."""
    denoiser = load_base(family, recipe(family, backend), "cpu")
    add_lora(cast("Any", denoiser), LoraSettings(rank=2), targets=family.lora_targets(), seed=1)
    kernels, forward = Kernels(), denoiser.forward

    def recorded(*args: Any, **options: Any) -> Any:
        with kernels:
            return forward(*args, **options)

    denoiser.forward = recorded  # without the text encoders, whose attention is not the denoiser's
    backward(family, denoiser.train())
    return torch.cat(
        [cast("Any", each.grad).flatten() for each in trainable_weights(denoiser)]
    ), kernels.only_math


@pytest.mark.parametrize("kind", TINY)
def test_a_backend_is_refused_for_exactly_the_models_on_which_it_has_no_effect(
    tiny_model: TinyModel, kind: str
) -> None:
    family = load_family(tiny_model(kind))
    _, only_math = adapter_gradients(family, "_native_math")
    assert only_math == {not is_refused(family, "_native_math")}
    assert not is_refused(family, "native")


@pytest.mark.parametrize("kind", ["FLUX.1 dev", "Qwen-Image"])
def test_the_plain_kernel_gives_the_gradients_of_the_default_one(tiny_model: TinyModel, kind: str) -> None:
    family = load_family(tiny_model(kind))
    default, plain = (adapter_gradients(family, backend) for backend in ("native", "_native_math"))
    assert default[1] == {False}
    torch.testing.assert_close(plain[0], default[0], rtol=1e-4, atol=1e-7)


def test_the_error_names_the_class_without_backends(tiny_model: TinyModel) -> None:
    family = load_family(tiny_model("Stable Diffusion XL"))
    with pytest.raises(TrainingError, match="has no effect on Stable Diffusion XL") as excinfo:
        require_attention_backend(recipe(family, "_native_math").training, family)
    assert "native" in excinfo.value.fix


def test_a_backend_for_gpus_is_refused_on_a_cpu(tiny_model: TinyModel) -> None:
    family = load_family(tiny_model("FLUX.1 dev"))
    with pytest.raises(TrainingError, match="attention_backend: _native_efficient needs a GPU, got cpu"):
        load_base(family, recipe(family, "_native_efficient"), "cpu")


@pytest.mark.parametrize("name", ["sage", "_flash_3", "_native_flash", "flex", "fast"])
def test_a_backend_that_does_not_train_is_a_mistake_in_the_recipe(tiny_model: TinyModel, name: str) -> None:
    with pytest.raises(RecipeError, match="attention_backend"):
        recipe(load_family(tiny_model("FLUX.1 dev")), name)


def test_the_environment_variable_of_diffusers_is_refused() -> None:
    refuse_variable({})
    refuse_variable({"DIFFUSERS_ATTN_BACKEND": "native"})
    with pytest.raises(TrainingError, match="DIFFUSERS_ATTN_BACKEND is 'sage'") as excinfo:
        refuse_variable({"DIFFUSERS_ATTN_BACKEND": "sage"})
    assert "training.attention_backend" in excinfo.value.fix
