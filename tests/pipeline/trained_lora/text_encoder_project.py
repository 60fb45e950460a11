"""Helpers that create a project with trained text encoders, and its engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from pipeline.recipe import LoraSettings
from pipeline.trained_lora.worker.engine import Engine
from tests.pipeline.trained_lora.project import FEW_MODULES

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj")


def settings(**text: Any) -> LoraSettings:
    return LoraSettings.model_validate_json(json.dumps({**FEW_MODULES, "text_encoders": text}))


def project_of(
    make_project: Callable[..., Project],
    prediction: str = "epsilon",
    text: Any = None,
    modules: dict[str, Any] = FEW_MODULES,
    **training: Any,
) -> Project:
    """Return a project that trains text encoders, and `modules` of the denoiser."""
    lora = {**modules, "text_encoders": {} if text is None else text}
    return make_project(prediction=prediction, lora=lora, **training)


def with_large_weights(engine: Engine) -> Engine:
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in engine.weights:
            weight.copy_(weight + 0.2 * torch.randn(weight.shape, generator=rng))
    return engine
