"""Layers of `training.compute` on a GPU: the numbers of torchao's layers, and the number of kernels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("torchao")

from pipeline.trained_lora.worker.compiled import missing_for_kernels
from pipeline.trained_lora.worker.eight_bit import EightBitLinear

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def torchao_layer(device: str, dtype: torch.dtype, *, bias: bool) -> nn.Linear:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    torch.manual_seed(0)
    layer = nn.Linear(2560, 1280, bias=bias, dtype=dtype).requires_grad_(False).to(device)
    quantize_(layer, Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))
    return layer


def with_kernels(device: str) -> None:
    """Use the kernels for GPUs."""
    missing = missing_for_kernels()
    if missing is not None:
        pytest.skip(f"needs {missing}")
    if device == "cuda":
        from pipeline.trained_lora.worker import eight_bit_kernels

        eight_bit_kernels.register()


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_numbers_are_those_of_torchaos_own_layer(device: str, dtype: torch.dtype, bias: bool) -> None:
    """The last bits may differ where torch's operators on CUDA round in another order."""
    if device == "cuda":
        with_kernels(device)
    layer = torchao_layer(device, dtype, bias=bias)
    hidden = torch.randn(2, 300, 2560, device=device).mul(3).to(dtype)
    hidden[0, 0] = 0.0
    expected = layer(hidden)
    actual = EightBitLinear(layer)(hidden)
    differing = (actual != expected).float().mean()
    assert differing < 1e-3
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


def test_a_value_that_is_not_finite_reaches_the_output(device: str) -> None:
    if device == "cuda":
        with_kernels(device)
    layer = EightBitLinear(torchao_layer(device, torch.bfloat16, bias=True))
    hidden = torch.randn(40, 2560, device=device, dtype=torch.bfloat16)
    hidden[3, 5], hidden[7, 2000] = float("nan"), float("inf")
    is_finite = layer(hidden).isfinite().all(dim=1)
    assert (~is_finite).nonzero().flatten().tolist() == [3, 7]


def test_two_kernels_and_a_product_are_launched(cuda: str) -> None:
    with_kernels(cuda)
    layer = EightBitLinear(torchao_layer(cuda, torch.bfloat16, bias=True))
    hidden = torch.randn(600, 2560, device=cuda, dtype=torch.bfloat16)
    layer(hidden)  # compiles
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        layer(hidden)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
    assert len(kernels) <= 4, kernels  # cuBLAS may split the product
