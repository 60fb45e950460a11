"""The base model as training wants it: its number format, packed weights, memory against time, compiled."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch

from pipeline.errors import TrainingError

if TYPE_CHECKING:
    from torch import nn

    from pipeline.models.worker.family import WorkerFamily
    from pipeline.recipe import Recipe

BASE_DTYPES = {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Of the frozen base weights, by `accelerate.mixed_precision`; LoRA weights are float32 always."""

_WHERE = "training.quantize"


def load_base(family: WorkerFamily, recipe: Recipe, device: str) -> nn.Module:
    """The frozen denoiser on `device`, its weights packed where the recipe asks for it.

    Raises:
        TrainingError: The packing needs a package or a GPU that is not there, or fits no weight.
    """
    dtype, kind = BASE_DTYPES[recipe.accelerate.mixed_precision], recipe.training.quantize
    denoiser = family.denoiser.load(dtype, device, quantization=quantization(kind, dtype, device))
    if kind != "none" and not any(map(_packed, denoiser.parameters())):
        what, fix = f"{kind} packed no weight of {type(denoiser).__name__}", "set training.quantize: none"
        raise TrainingError(what, where=_WHERE, fix=fix)
    return denoiser


def _packed(weight: nn.Parameter) -> bool:
    """Bitsandbytes keeps bytes in parameters of its own classes, torchao has a tensor class."""
    return weight.dtype in (torch.int8, torch.uint8) or hasattr(weight, "__tensor_flatten__")


def quantization(kind: str, dtype: str, device: str) -> Any:
    """Diffusers' quantisation config for a kind of `training.quantize`; None for "none".

    Args:
        kind: As the recipe has it.
        dtype: In which the unpacked weights are multiplied.
        device: Where the model will lie.

    Raises:
        TrainingError: The kind needs a package or a GPU that is not there.
    """
    if kind == "none":
        return None
    import diffusers

    try:
        if kind.endswith("_torchao"):
            name = {"int8_torchao": "Int8WeightOnlyConfig", "fp8_torchao": "Float8WeightOnlyConfig"}[kind]
            return diffusers.TorchAoConfig(getattr(import_module("torchao.quantization"), name)())
        if not device.startswith("cuda"):
            fix = "train on a GPU, or set training.quantize to int8_torchao or fp8_torchao, which need none"
            raise TrainingError(f"{kind} of bitsandbytes needs a GPU", where=_WHERE, fix=fix)
        import_module("bitsandbytes")
    except ImportError as err:
        package = "torchao" if kind.endswith("_torchao") else "bitsandbytes"
        fix = f"install it, for example by `pip install {package}`, or set training.quantize: none"
        raise TrainingError(f"{kind} needs {package}: {err}", where=_WHERE, fix=fix) from err
    if kind == "int8":
        return diffusers.BitsAndBytesConfig(load_in_8bit=True)
    return diffusers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=getattr(torch, dtype)
    )


def enable_memory_savings_and_compile(family: WorkerFamily, denoiser: nn.Module, recipe: Recipe) -> None:
    """Recompute activations instead of keeping them, and compile the repeated blocks, as the recipe asks.

    Call it when the adapter is in place.

    Raises:
        TrainingError: The model cannot.
    """
    try:
        if recipe.training.gradient_checkpointing:
            family.denoiser.recompute_activations(denoiser)
        if recipe.training.compile:
            cast("Any", denoiser).compile_repeated_blocks()
    except ValueError as err:
        key = "compile" if recipe.training.compile else "gradient_checkpointing"
        where, fix = f"training.{key}", f"set {key}: false"
        raise TrainingError(f"{type(denoiser).__name__} cannot: {err}", where=where, fix=fix) from err
