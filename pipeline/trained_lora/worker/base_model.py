"""Loading the frozen base model for training: dtype, quantisation, gradient checkpointing and compilation."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch

from pipeline.errors import TrainingError, install_extra
from pipeline.models.worker.offload.host_memory import training_memory
from pipeline.models.worker.offload.streamed_blocks import repeated_blocks, stream_blocks, streamed_blocks
from pipeline.trained_lora.attention_backends import DEFAULT_BACKEND, require_backend_of_device
from pipeline.trained_lora.worker.compiled import allow_recompilation, missing_for_kernels
from pipeline.trained_lora.worker.eight_bit import use_eight_bit_products
from pipeline.trained_lora.worker.nf4 import unpacked_layers
from pipeline.trained_lora.worker.sharding import shard_base

if TYPE_CHECKING:
    from torch import nn

    from pipeline.models.families import Family
    from pipeline.models.worker.family import WorkerFamily
    from pipeline.recipe import Recipe

BASE_DTYPES = {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Dtypes by accelerate's names of mixed precisions."""

_TORCHAO_CONFIGS = {
    "int8": "Int8WeightOnlyConfig",
    "int8_torchao": "Int8WeightOnlyConfig",
    "fp8_torchao": "Float8WeightOnlyConfig",
}
"""Classes of `torchao.quantization` by `training.quantize`."""

_PRODUCT_CONFIGS = {
    "int8": "Int8DynamicActivationInt8WeightConfig",
    "fp8": "Float8DynamicActivationFloat8WeightConfig",
}
"""Classes of `torchao.quantization` by `training.compute`."""

_FP8_CAPABILITY = (8, 9)
"""Lowest compute capability of NVIDIA GPUs that multiply fp8: Ada and Hopper."""

_QUANTIZE_KEY = "training.quantize"


def base_dtype(family: Family, recipe: Recipe) -> str:
    """Return the dtype of the frozen base weights; LoRA weights are always float32."""
    return BASE_DTYPES[family.mixed_precision(recipe.accelerate.mixed_precision)]


def load_base(family: WorkerFamily, recipe: Recipe, device: str) -> nn.Module:
    """Load the denoiser for `device`, quantised, streamed or sharded if the recipe sets so.

    `training.offload` must be resolved, see `memory.resident_blocks`.

    Raises:
        TrainingError: The quantisation, 8-bit products or attention backend need a missing package or GPU, or
            apply to no weight, or the denoiser has no blocks to stream.
    """
    training, dtype = recipe.training, base_dtype(family, recipe)
    require_backend_of_device(training, device)
    kind, compute, offload = training.quantize, training.compute, training.offload
    assert offload != "auto", "training.offload is not resolved"
    unpacked = unpacked_layers(family) if kind == "nf4" or compute != "none" else ()
    if compute == "none":
        config = quantization(kind, dtype, device, unpacked=unpacked)
    else:
        config = eight_bit_products(compute, device, unpacked=unpacked)

    # Streamed and sharded weights may not fit on the device together. Only a GPU can pack nf4.
    shard = recipe.accelerate.shard
    load_device = "cpu" if shard or (offload != "none" and kind != "nf4") else device
    denoiser = family.denoiser.load(dtype, load_device, quantization=config)
    if training.attention_backend != DEFAULT_BACKEND:
        cast("Any", denoiser).set_attention_backend(training.attention_backend)
    if config is not None and not any(map(_is_quantized, denoiser.parameters())):
        key, value = ("compute", compute) if compute != "none" else ("quantize", kind)
        raise TrainingError(
            f"{value} quantised no weight of {type(denoiser).__name__}",
            where=f"training.{key}",
            fix=f"set training.{key}: none",
        )
    if compute != "none":
        use_eight_bit_products(denoiser)
        if device.startswith("cuda") and missing_for_kernels() is None:
            from pipeline.trained_lora.worker import eight_bit_kernels

            eight_bit_kernels.register()

    # After layers were replaced, because a hook belongs to its module.
    cast_inputs_of_quantized_layers(denoiser, getattr(torch, dtype))
    if offload != "none":
        stream_denoiser(denoiser, offload, device)
    if shard:
        shard_base(denoiser, torch.device(device))
    return denoiser


def stream_denoiser(denoiser: nn.Module, num_resident: int, device: str) -> None:
    """Keep `num_resident` of the repeated blocks on the device and stream all others."""
    if not repeated_blocks(denoiser):
        raise TrainingError(
            f"training.offload requires a denoiser of repeated blocks, got {type(denoiser).__name__}",
            where=f"training.offload: {num_resident}",
            fix="set training.offload: none; to save memory, set training.quantize",
        )
    target = torch.device(device)
    stream_blocks(denoiser, num_resident, target, memory=training_memory(target))


def cast_inputs_of_quantized_layers(denoiser: nn.Module, dtype: torch.dtype) -> None:
    """Make quantised layers compute and return `dtype`, as other layers do under autocast."""

    # Autocast on CUDA runs norms in float32, and quantised layers return their input's dtype. Without the
    # cast, the residual stream and everything stored for the backward pass would be float32 (FAILURES G03).
    def cast(_layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(each.to(dtype) if torch.is_tensor(each) else each for each in inputs)

    for module in denoiser.modules():
        if any(_is_quantized(weight) for weight in module.parameters(recurse=False)):
            module.register_forward_pre_hook(cast)


def _is_quantized(weight: nn.Parameter) -> bool:
    # bitsandbytes stores byte tensors, torchao a tensor subclass.
    return weight.dtype in (torch.int8, torch.uint8) or hasattr(weight, "__tensor_flatten__")


def quantization(kind: str, dtype: str, device: str, *, unpacked: Sequence[str] = ()) -> Any:
    """Return diffusers' quantisation config for a value of `training.quantize`; None for "none".

    `dtype` is the dtype of matrix products with unpacked weights, and nf4 does not pack the layers
    `unpacked`.
    """
    if kind == "none":
        return None
    import diffusers

    uses_torchao = kind in _TORCHAO_CONFIGS
    package = "torchao" if uses_torchao else "bitsandbytes"
    try:
        if uses_torchao:
            config = getattr(import_module("torchao.quantization"), _TORCHAO_CONFIGS[kind])
            # torchao's settings for the compiler would hold for the whole process, and lengthen compilation.
            return diffusers.TorchAoConfig(config(set_inductor_config=False))
        if not device.startswith("cuda"):
            raise TrainingError(
                f"training.quantize: {kind} needs a CUDA GPU, because bitsandbytes does the quantization",
                where=_QUANTIZE_KEY,
                fix="train on a GPU, or set training.quantize to int8 or fp8_torchao",
            )
        import_module(package)
    except ImportError as err:
        raise TrainingError(
            f"{kind} needs {package}: {err}",
            where=_QUANTIZE_KEY,
            fix=f"install it with `{install_extra('gpu')}`, or set training.quantize: none",
        ) from err

    return diffusers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,  # the scales of the blocks take 8 bits instead of 32
        bnb_4bit_compute_dtype=getattr(torch, dtype),
        llm_int8_skip_modules=list(unpacked),  # diffusers uses it for 4 bits too
    )


def eight_bit_products(compute: str, device: str, *, unpacked: Sequence[str]) -> Any:
    """Return diffusers' quantisation config for "int8" or "fp8" of `training.compute`.

    The layers `unpacked` are not packed.
    """
    import diffusers

    if compute == "fp8":
        # ROCm's builds call their devices cuda too, with other numbers as capability.
        is_nvidia = device.startswith("cuda") and torch.version.hip is None
        if not is_nvidia or torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
            raise TrainingError(
                f"fp8 products need an NVIDIA GPU of compute capability 8.9 or higher, got {device}",
                where="training.compute",
                fix="set training.compute: int8 or none",
            )
    try:
        config = getattr(import_module("torchao.quantization"), _PRODUCT_CONFIGS[compute])
        quantized = config(set_inductor_config=False)  # as in `quantization`
        return diffusers.TorchAoConfig(quantized, modules_to_not_convert=list(unpacked))
    except ImportError as err:
        raise TrainingError(
            f"compute: {compute} needs torchao: {err}",
            where="training.compute",
            fix=f"install it with `{install_extra('gpu')}`, or set training.compute: none",
        ) from err


def enable_memory_savings_and_compile(family: WorkerFamily, denoiser: nn.Module, recipe: Recipe) -> None:
    """Enable gradient checkpointing and compile the repeated blocks, as the recipe sets them.

    Call it after the adapter was added.
    """
    try:
        if recipe.training.gradient_checkpointing:
            streamed = streamed_blocks(denoiser)
            family.denoiser.recompute_activations(denoiser, streamed and streamed.checkpoint)
        if recipe.training.compile:
            allow_recompilation()
            _compile_blocks(denoiser)
    except ValueError as err:
        key = "compile" if recipe.training.compile else "gradient_checkpointing"
        raise TrainingError(
            f"{type(denoiser).__name__} does not support {key}: {err}",
            where=f"training.{key}",
            fix=f"set {key}: false",
        ) from err


def _compile_blocks(denoiser: nn.Module) -> None:
    if streamed_blocks(denoiser) is None:
        cast("Any", denoiser).compile_repeated_blocks()
        return

    # The hooks that copy the weights of streamed blocks stay outside of the compiled functions.
    for block in repeated_blocks(denoiser).values():
        block.forward = torch.compile(block.forward)
