"""The backend of the denoiser's attention in training, by diffusers' name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipeline.errors import TrainingError

if TYPE_CHECKING:
    from pipeline.models.families import Family
    from pipeline.recipe import TrainingSettings

DEFAULT_BACKEND = "native"

_KEY = "training.attention_backend"

_VARIABLE = "DIFFUSERS_ATTN_BACKEND"
"""Environment variable with which diffusers replaces its default backend."""

_WITHOUT_BACKENDS = frozenset(
    f"diffusers.{name}"
    for name in (
        "AuraFlowTransformer2DModel",
        "CogView4Transformer2DModel",
        "HiDreamImageTransformer2DModel",
        "Lumina2Transformer2DModel",
        "SanaTransformer2DModel",
        "SD3Transformer2DModel",
        "UNet2DConditionModel",
    )
)
"""Denoisers whose attention calls torch itself, so that diffusers' backends have no effect."""


def require_attention_backend(settings: TrainingSettings, family: Family) -> None:
    """Raise TrainingError if the recipe's backend has no effect on models of the family."""
    backend, denoiser = settings.attention_backend, family.spec.components[family.spec.denoiser_name]
    if backend != DEFAULT_BACKEND and denoiser in _WITHOUT_BACKENDS:
        raise TrainingError(
            f"attention_backend: {backend} has no effect on {family.spec.name}, because the attention of "
            f"{denoiser} calls torch itself and not through diffusers' backends",
            where=_KEY,
            fix=f"remove it, or set it to {DEFAULT_BACKEND}",
        )


def require_backend_of_device(settings: TrainingSettings, device: str) -> None:
    """Raise TrainingError if the recipe's backend has no kernels for this device."""
    backend = settings.attention_backend
    if backend in (DEFAULT_BACKEND, "_native_math") or device.startswith("cuda"):
        return
    raise TrainingError(
        f"attention_backend: {backend} needs a GPU, got {device}",
        where=_KEY,
        fix=f"train on a GPU, or set it to {DEFAULT_BACKEND}",
    )


def refuse_variable(environ: Mapping[str, str]) -> None:
    """Raise TrainingError if diffusers' environment variable chooses another backend than the recipe.

    Call it before diffusers is imported, which fails if the value is unknown.
    """
    backend = environ.get(_VARIABLE, DEFAULT_BACKEND)
    if backend != DEFAULT_BACKEND:
        raise TrainingError(
            f"the environment variable {_VARIABLE} is {backend!r}, which changes a training without a record",
            where="the environment of the training process",
            fix=f"unset it, and set {_KEY} in the recipe",
        )
