"""The dtypes in which the components of a base model compute.

A recipe sets one dtype, or "auto" for each component's own. The choice depends on the component alone and
is the same on every machine, because it is part of the keys of cache entries and of run ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AUTO = "auto"


def vae_dtype(setting: str, config: Mapping[str, Any]) -> str:
    """Return the dtype for a VAE: with "auto", float32 unless its configuration declares float16 safe."""
    if setting != AUTO:
        return setting

    # `force_upcast` is false in the configuration of a VAE that does not overflow in float16.
    return "float16" if config.get("force_upcast") is False else "float32"


def text_encoder_dtype(setting: str, component_class: str) -> str:
    """Return the dtype for a text encoder: with "auto", float32 for CLIP and bfloat16 for language models."""
    if setting != AUTO:
        return setting

    # Language models, T5 among them, are large, are published in bfloat16, and overflow in float16.
    name = component_class.rpartition(".")[2]
    return "float32" if name.startswith("CLIP") else "bfloat16"


def denoiser_precision(setting: str, denoiser_name: str) -> str:
    """Return a denoiser's mixed precision: with "auto", bf16 for transformers and no for UNets."""
    if setting != AUTO:
        return setting
    return "bf16" if denoiser_name == "transformer" else "no"


def dtypes_text(dtypes: Mapping[str, str]) -> str:
    """Return the dtypes of several components as text: one dtype if all agree, or each with its component.

    The text is part of the keys of text embeddings.
    """
    if len(set(dtypes.values())) == 1:
        return next(iter(dtypes.values()))
    return ", ".join(f"{role} {dtype}" for role, dtype in dtypes.items())
