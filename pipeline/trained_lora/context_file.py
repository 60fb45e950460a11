"""The LoRA file in `model.context_lora`, checked without torch before anything is encoded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import TrainingError
from pipeline.recipe.isolation import CONTEXT_KEY
from pipeline.storage.regular_files import file_sha256
from pipeline.trained_lora.run_folder import RunLayout, read_record

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

_TEXT_PREFIXES = ("text_encoder", "lora_te")
"""Beginnings of keys of text encoders, in the layouts of diffusers, kohya and ComfyUI."""


def require_context_file(recipe: Recipe) -> None:
    """Raise TrainingError unless the recipe's `context_lora` is null or a LoRA of a denoiser alone."""
    from safetensors import SafetensorError, safe_open

    context = recipe.model.context_lora
    if context is None:
        return
    if not context.path.is_file():
        raise refused_context(context.path, "it is not a file")
    try:
        with safe_open(context.path, framework="np") as file:
            keys = sorted(file.keys())
    except (OSError, SafetensorError) as err:
        raise refused_context(context.path, f"it cannot be read: {err}") from err

    # The text encoders run without it, so that their embeddings can be shared and cached.
    if text := [key for key in keys if key.startswith(_TEXT_PREFIXES)]:
        raise refused_context(context.path, f"it also changes text encoders, such as {text[0]}")


def context_facts(recipe: Recipe) -> dict[str, object]:
    """Return the facts of the context LoRA that decide a run's weights; empty without one.

    Raises:
        TrainingError: The file cannot be read.
    """
    context = recipe.model.context_lora
    if context is None:
        return {}
    try:
        digest = file_sha256(context.path)
    except OSError as err:
        raise refused_context(context.path, f"it cannot be read: {err}") from err
    return {"context_lora": {"sha256": digest, "scale": context.scale}}


def require_same_context(recipe: Recipe, layout: RunLayout) -> None:
    """Raise TrainingError if the context LoRA of a run is missing, or has changed since its training.

    `recipe` is the one with which the run was trained.
    """
    if recipe.model.context_lora is None:
        return
    facts = read_record(layout.facts).get("model", {})
    if facts.get("context_lora") != context_facts(recipe)["context_lora"]:
        path = recipe.model.context_lora.path
        raise refused_context(path, f"it has changed since run {layout.folder.name} was trained")


def refused_context(path: Path, reason: str) -> TrainingError:
    """Return the error for a context LoRA that cannot be used."""
    return TrainingError(
        f"the context LoRA cannot be used: {reason}",
        where=f"{CONTEXT_KEY}: {path}",
        fix=f"set {CONTEXT_KEY} to a LoRA of the denoiser alone, trained for this base model, that diffusers "
        "can load",
    )
