from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # its documented place, in spite of the name

from demo.tiny_models import make_tiny_flux
from pipeline.errors import TrainingError
from pipeline.models.worker.family import load_family
from pipeline.recipe import LoraSettings
from pipeline.recipe.errors import find_mistakes
from pipeline.recipe.yaml_document import dotted
from pipeline.trained_lora.supported_settings import memory_warning
from pipeline.trained_lora.worker.adapter.lora import add_lora
from pipeline.trained_lora.worker.base_model import eight_bit_products, load_base, quantization
from pipeline.trained_lora.worker.eight_bit import (
    MIN_ROWS,
    EightBitLinear,
    unpacked,
    use_eight_bit_products,
)
from pipeline.trained_lora.worker.export.exporter import Exporter
from tests.pipeline.trained_lora.runs import run_until
from tests.pipeline.trained_lora.worker.test_base_model import (
    bytes_in_use,
    engine_and_input,
    gradients,
    predict,
    recipe_with,
)
from tests.pipeline.trained_lora.worker.test_loop import outcome
from tests.tensor_differences import differing_tensors

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed"),
    pytest.mark.filterwarnings("ignore"),  # torchao warns about its kernels for GPUs on import
]

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
"""Largest relative error of rounding to a dtype."""


def torchao_layer(weight: Tensor, kind: str = "int8", bias: Tensor | None = None) -> nn.Linear:
    """Return torchao's own layer with this weight; its configuration of fp8 requires a GPU."""
    from torchao.float8.inference import Float8MMConfig
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
    from torchao.quantization.granularity import PerTensor
    from torchao.quantization.quantize_.workflows import Float8Tensor, QuantizeTensorToFloat8Kwargs

    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    layer.weight.data = weight.clone()
    if bias is not None:
        layer.bias.data = bias.clone()
    layer.requires_grad_(False)
    if kind == "int8":
        quantize_(layer, Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))
        return layer
    packed: Any = Float8Tensor.from_hp(
        weight,
        granularity=PerTensor(),
        mm_config=Float8MMConfig(use_fast_accum=True),
        act_quant_kwargs=QuantizeTensorToFloat8Kwargs(torch.float8_e4m3fn, PerTensor()),
    )
    layer.weight = nn.Parameter(packed, requires_grad=False)
    return layer


def packed_layer(weight: Tensor, kind: str = "int8", bias: Tensor | None = None) -> EightBitLinear:
    """Return the layer that training makes of a linear layer with this weight."""
    network = nn.Sequential(torchao_layer(weight, kind, bias))
    use_eight_bit_products(network)
    (packed,) = network
    assert isinstance(packed, EightBitLinear)
    return packed


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded_rows(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return integers and scales of rows, by torchao's rule for symmetric int8."""
    scales = np.abs(values).max(axis=1, keepdims=True) / np.float32(127.5)
    return np.clip(np.rint(values * (np.float32(1) / scales)), -128, 127).astype(np.int64), scales


@pytest.mark.parametrize("num_features", [8, 64, 1040])
def test_the_int8_product_equals_the_product_of_integers_exactly(num_features: int) -> None:
    """Up to 1,040 features, sums of products of 8-bit integers are exact in float32."""
    weight, hidden = random(48, num_features), random(40, num_features, seed=1)
    weight[0], hidden[0] = 1.0, -1.0  # integers of the largest size everywhere
    actual = packed_layer(weight)(hidden).numpy()

    integers, scales = rounded_rows(hidden.numpy())
    weight_integers, weight_scales = rounded_rows(weight.numpy())
    product = integers @ weight_integers.T
    assert np.abs(product).max() >= 127 * 127 * num_features
    expected = product.astype(np.float32) * scales * weight_scales.T
    assert np.array_equal(actual, expected)


@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF)
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_the_gradient_is_within_the_rounding_of_the_weights(kind: str, dtype: torch.dtype) -> None:
    """The input's rounding does not reach the gradient, whose products are those of `dtype`."""
    weight, gradient = random(96, 64).to(dtype), random(3, 20, 96, seed=2).to(dtype)
    layer = packed_layer(weight, kind)
    hidden = random(3, 20, 64, seed=1).to(dtype).requires_grad_()
    layer(hidden).backward(gradient)
    assert hidden.grad is not None
    assert hidden.grad.dtype == dtype

    exact = gradient.double() @ weight.double()
    magnitude = weight.double().abs()
    if kind == "int8":
        rounding = magnitude.amax(dim=1, keepdim=True) / 127.5 / 2
    else:  # 3 bits of fraction, and subnormal numbers below 2^-6 of a scale of amax / 448
        rounding = torch.maximum(magnitude * 2.0**-4, magnitude.amax() / 448 * 2.0**-10)
    roundoff = UNIT_ROUNDOFF[dtype]
    bound = gradient.double().abs() @ (rounding + (roundoff * 2 + 96 * 2.0**-24) * magnitude * 1.1)
    bound = bound + roundoff * exact.abs() * 1.1
    error = (hidden.grad.double() - exact).abs()
    assert (error <= bound).all(), f"largest ratio to the bound: {(error / bound).max():.3f}"
    assert error.max() > 0.05 * bound.max()


@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_int8_product_is_that_of_torchaos_own_layer_bit_for_bit(
    dtype: torch.dtype, with_bias: bool
) -> None:
    weight, bias = random(96, 200).to(dtype), random(96, seed=3).to(dtype) if with_bias else None
    layer, torchaos = packed_layer(weight, bias=bias), torchao_layer(weight, bias=bias)
    hidden = random(2, 30, 200, seed=1).mul(50).to(dtype)
    hidden[0, 0] = 0.0
    assert torch.equal(layer(hidden), torchaos(hidden))
    packed: Any = torchaos.weight
    weights = unpacked(layer.weight, layer.scale, layer.is_fp8, dtype)
    assert torch.equal(weights, packed.dequantize(dtype))


@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fp8_product_is_that_of_torchaos_own_layer_bit_for_bit(
    dtype: torch.dtype, with_bias: bool
) -> None:
    weight, bias = random(96, 64).to(dtype), random(96, seed=3).to(dtype) if with_bias else None
    hidden = random(2, 30, 64, seed=1).to(dtype)
    layer, torchaos = packed_layer(weight, "fp8", bias), torchao_layer(weight, "fp8", bias)
    assert torch.equal(layer(hidden), torchaos(hidden))


class _Kernels(TorchDispatchMode):
    """Lists the operators that compute; on a GPU, each is one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Views and empty tensors start no kernel.
        if not func.is_view and not any(part in str(func) for part in ("view", "empty")):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_an_int8_layer_takes_few_kernels_and_writes_no_tensor_as_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchao's branch for GPUs formats the layer's input, which waits for the GPU for each number."""
    layer = packed_layer(random(48, 64).bfloat16(), bias=random(48, seed=3).bfloat16())
    hidden = random(40, 64, seed=1).bfloat16().requires_grad_()

    def refuse(*_: Any, **__: Any) -> str:
        raise AssertionError("a tensor is formatted as text")

    monkeypatch.setattr(Tensor, "__repr__", refuse)
    monkeypatch.setattr("torchao.kernel.intmm._is_device", lambda *_: False)
    with _Kernels() as forward:
        output = layer(hidden)
    assert forward.names == [
        "latentline.round_rows.default",
        "aten._int_mm.default",
        "latentline.rescale.default",
    ]
    gradient = torch.ones_like(output)
    with _Kernels() as backward:
        output.backward(gradient)
    assert backward.names == ["aten.mul.out", "aten.mm.default"]


def test_few_rows_are_multiplied_with_unpacked_weights() -> None:
    layer = packed_layer(random(48, 64), bias=random(48, seed=3))
    hidden = random(MIN_ROWS, 64, seed=1)
    weight = unpacked(layer.weight, layer.scale, layer.is_fp8, hidden.dtype)
    few = nn.functional.linear(hidden[1:], weight, layer.bias)
    assert torch.equal(layer(hidden[1:]), few)
    assert not torch.equal(layer(hidden)[1:], few)


def test_layers_outside_of_blocks_stay_as_they_are(tmp_path: Path) -> None:
    make_tiny_flux(tmp_path / "flux")
    flux = load_family(tmp_path / "flux")
    denoiser = load_base(flux, recipe_with(flux.model.path, "none", compute="int8"), "cpu")
    kinds = {name: type(module) for name, module in denoiser.named_modules() if isinstance(module, nn.Linear)}
    assert kinds["x_embedder"] is nn.Linear
    assert kinds["transformer_blocks.0.attn.to_q"] is EightBitLinear
    in_blocks = {kind for name, kind in kinds.items() if "transformer_blocks" in name}
    assert in_blocks == {EightBitLinear}


def test_eight_bit_products_give_almost_the_same_gradients_in_less_memory_and_can_be_exported(
    make_project: Callable[..., Project], tmp_path: Path
) -> None:
    project = make_project()
    plain, engine_input = engine_and_input(project), engine_and_input(project, compute="int8")
    losses, expected, _ = gradients(*plain)
    loss, actual, _ = gradients(*engine_input)
    torch.testing.assert_close(loss, losses, rtol=0.1, atol=0.0)
    assert not torch.equal(loss, losses)
    for one, other in zip(actual, expected, strict=True):
        assert float(nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0)) > 0.98
    assert bytes_in_use(*engine_input) < bytes_in_use(*plain)
    training = project.recipe.training.model_copy(update={"compute": "int8"})
    assert memory_warning(training) is None

    exporter = Exporter(load_family(project.job().base), "demo", {})
    exported = exporter.export(engine_input[0].networks, tmp_path)
    assert max(file.max_error for file in exported) < 1e-6


def test_recomputed_activations_give_the_same_gradients(make_project: Callable[..., Project]) -> None:
    project = make_project(compute="int8")
    losses, expected, _ = gradients(*engine_and_input(project))
    loss, actual, _ = gradients(*engine_and_input(project, gradient_checkpointing=True))
    assert torch.equal(loss, losses)
    assert differing_tensors(actual, expected) == []


@pytest.mark.slow
def test_compiled_blocks_give_almost_the_same_gradients(make_project: Callable[..., Project]) -> None:
    """The compiler traces the blocks; without a C++ compiler, their graphs run as they are."""
    lora = {"rank": 4, "alpha": 2.0, "modules": ["mid_block.*.to_q"]}
    project = make_project(sizes={"64x64": 2}, lora=lora, compute="int8")
    losses, expected, _ = gradients(*engine_and_input(project))
    engine, micro = engine_and_input(project, compile=True)
    denoiser: Any = engine.denoiser
    denoiser.compile_repeated_blocks(backend="eager")
    loss, actual, _ = gradients(engine, micro)
    torch.testing.assert_close(loss, losses)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_packed_blocks_of_a_transformer_can_be_compiled(tmp_path: Path) -> None:
    """torch cannot compile blocks of FLUX.1 with torchao's own weights: "tensor subclass inputs"."""
    make_tiny_flux(tmp_path / "flux")
    flux = load_family(tmp_path / "flux")
    denoiser: Any = load_base(flux, recipe_with(flux.model.path, "none", "no", compute="int8"), "cpu")
    add_lora(denoiser, LoraSettings(), targets=flux.lora_targets(), seed=0)
    expected = predict(flux, denoiser)
    denoiser.compile_repeated_blocks(backend="aot_eager")  # without a C++ compiler, which the default needs
    prediction = predict(flux, denoiser)
    torch.testing.assert_close(prediction, expected)
    prediction.sum().backward()
    assert any(weight.grad is not None for weight in denoiser.parameters())


@pytest.mark.slow
def test_a_run_draws_previews_and_resumes_bit_for_bit(make_project: Callable[..., Project]) -> None:
    project = make_project(compute="int8", sample_every=3, sample_prompts=["photograph 0 of 64x64"])
    whole, cut = project.changed("whole").job(), project.changed("cut").job()
    assert run_until(whole)[0]
    assert not run_until(cut, stop_after=3)[0]
    assert run_until(cut)[0]
    assert len(list((whole.folder / "samples").glob("*.png"))) == 3
    assert outcome(cut) == outcome(whole)


def test_packing_leaves_the_compilers_settings_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao would let the compiler try many kernels in the whole process, which takes minutes."""
    from torchao.quantization import quantize_

    def refuse() -> None:
        raise AssertionError("torchao sets the compiler's settings")

    monkeypatch.setattr("torchao.quantization.utils.recommended_inductor_config_setter", refuse)
    for config in (
        quantization("int8", "bfloat16", "cpu"),
        quantization("fp8_torchao", "bfloat16", "cpu"),
        eight_bit_products("int8", "cpu", unpacked=()),
    ):
        quantize_(nn.Sequential(nn.Linear(16, 16)), config.quant_type)


def test_fp8_without_a_gpu_is_an_error_with_an_alternative() -> None:
    with pytest.raises(
        TrainingError, match=r"NVIDIA GPU of compute capability 8\.9 or higher, got cpu"
    ) as excinfo:
        eight_bit_products("fp8", "cpu", unpacked=())
    assert excinfo.value.where == "training.compute"
    assert excinfo.value.fix == "set training.compute: int8 or none"


@pytest.mark.parametrize(
    ("training", "keys"),
    [
        ({"quantize": "nf4"}, ["training.compute"]),
        ({"quantize": "fp8_torchao"}, ["training.compute"]),
        ({"quantize": "int8"}, []),
        ({"quantize": "int8_torchao"}, []),
        ({"lora": {"dora": True}}, ["training.compute"]),
        ({"lora": {"kind": "lokr"}}, ["training.compute"]),
        ({"lora": {"init": "pissa"}}, ["training.compute"]),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_int8_products_are_recipe_errors(
    training: dict[str, Any], keys: list[str]
) -> None:
    smallest = {"datasets": [{"name": "p", "path": "p"}], "output_dir": "o", "model": {"base": "a/b"}}
    mistakes = find_mistakes({**smallest, "training": {"compute": "int8", **training}})
    assert [dotted(each.path) for each in mistakes] == keys
