"""Checks that a base model supports the recipe's training settings, made before anything is launched."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from pipeline.errors import TrainingError, counted
from pipeline.models.families import FAMILIES, Family
from pipeline.models.families.parts.lora_keys import StackedKeys
from pipeline.models.resolve import missing_files
from pipeline.models.size_multiple import local_family
from pipeline.models.training_adapter import missing_adapter_warning
from pipeline.recipe.optimizer_classes import OPTIMIZERS
from pipeline.recipe.settings import one_of
from pipeline.trained_lora.attention_backends import require_attention_backend
from pipeline.trained_lora.module_patterns import require_module_patterns

if TYPE_CHECKING:
    from pipeline.models.families import Prediction
    from pipeline.recipe import Recipe, TrainingSettings


HIGH_LEARNING_RATE = 0.1
"""Learning rate from which a warning names it. Prodigy's is 1, and other optimizers' are far below."""


def require_trackers(settings: TrainingSettings) -> None:
    """Raise TrainingError if the package of a tracker is not installed."""
    # Each tracker has the name of the package that its users import and install.
    missing = [name for name in settings.trackers if find_spec(name) is None]
    if missing:
        packages = " ".join(missing)
        raise TrainingError(
            f"{counted(len(missing), 'package')} of trackers not installed: {', '.join(missing)}",
            where="training.trackers",
            fix=f"run .venv/bin/pip install {packages} (docs/outputs.md, Experiment trackers), or remove "
            f"{', '.join(missing)} from training.trackers",
        )


def require_supported_settings(recipe: Recipe, family: Family | None = None) -> None:
    """Raise TrainingError if the base model does not support one of the recipe's training settings.

    Without a family, only a base model in a local folder is checked.
    """
    family = family or local_family(recipe)
    if family is None or missing_files(family.model.path, family.model.replaced) is not None:
        return  # `check_local_base` reports missing files
    require_objective(recipe.training, family.prediction_type())
    require_replaceable_shift(recipe.training, family)
    require_text_encoders(recipe.training, family)
    require_rotation_keys(recipe.training, family)
    require_module_patterns(recipe.training.lora, family)
    require_attention_backend(recipe.training, family)


def require_text_encoders(settings: TrainingSettings, family: Family) -> None:
    """Raise TrainingError if the recipe trains text encoders that the family cannot train."""
    if settings.lora.text_encoders is None or family.trainable_text_encoders():
        return
    supported = [each.name for each in FAMILIES if each.text.trains_encoders]
    raise TrainingError(
        f"the text encoders of {family.spec.name} cannot be trained; {one_of(supported)} models support it",
        where="training.lora.text_encoders",
        fix=f"remove training.lora.text_encoders, or set model.base to a {one_of(supported)} model",
    )


def require_rotation_keys(settings: TrainingSettings, family: Family) -> None:
    """Raise TrainingError if ComfyUI's layout of the family cannot hold the recipe's OFT, LoHa or LoKr."""
    keys = family.spec.lora
    if not (isinstance(keys, StackedKeys) and keys.comfyui_as_kohya):
        return
    if settings.lora.native_file:
        raise TrainingError(
            f"lora.native_file is not available for {family.spec.name}: ComfyUI's model joins query, key and "
            f"value to one layer, and no {settings.lora.kind} equals three of them",
            where="training.lora.native_file",
            fix="remove it; the converted LoRA works in ComfyUI",
        )
    if settings.lora.kind != "oft":
        return
    raise TrainingError(
        f"kind: oft is not available for {family.spec.name}: ComfyUI's model joins query, key and value to "
        "one layer, which can have only one rotation of its input",
        where="training.lora.kind",
        fix="set it to lora, loha or lokr",
    )


def require_replaceable_shift(settings: TrainingSettings, family: Family) -> None:
    """Raise TrainingError if the recipe sets a shift of noise levels that the family does not read."""
    shift = settings.timesteps.shift
    if shift is None or not family.spec.noise.own_shift:
        return
    raise TrainingError(
        f"timesteps.shift {shift} is not available for {family.spec.name}, "
        f"because {family.spec.noise.own_shift}",
        where="training.timesteps.shift",
        fix="set it to null; to train more on noisy levels, set timesteps.density: logit_normal with "
        "timesteps.location above 0",
    )


def require_objective(settings: TrainingSettings, prediction: Prediction) -> None:
    """Raise TrainingError if a setting does not apply to a model that predicts `prediction`."""
    # With zero signal the input is the noise itself, so an epsilon model would only learn to copy it.
    if settings.noise.zero_terminal_snr and prediction != "v_prediction":
        raise TrainingError(
            f"noise.zero_terminal_snr requires a v-prediction model, but this model predicts {prediction}",
            where="training.noise.zero_terminal_snr",
            fix="set it to false, or use a v-prediction base model",
        )

    if prediction != "flow":
        if settings.timesteps.shift is not None:
            raise TrainingError(
                f"timesteps.shift {settings.timesteps.shift} requires a flow-matching model, but this model "
                f"predicts {prediction} on a beta schedule",
                where="training.timesteps.shift",
                fix="set it to null; to train more on noisy timesteps, use timesteps.density: logit_normal "
                "with timesteps.location above 0",
            )
        return

    beta_schedule_only = (
        ("loss.weighting", settings.loss.weighting, "none"),
        ("noise.offset", settings.noise.offset, 0.0),
    )
    for key, value, default in beta_schedule_only:
        if value != default:
            raise TrainingError(
                f"{key} {value} requires a model with a beta schedule, but this model uses flow matching",
                where=f"training.{key}",
                fix=f"set it to {default}",
            )


def training_warnings(recipe: Recipe, family: Family) -> list[str]:
    """Return the warnings about the recipe's settings that a training logs at its start."""
    training = recipe.training
    warnings = (
        missing_adapter_warning(recipe, family),
        memory_warning(training),
        _learning_rate_warning(training),
    )
    return [warning for warning in warnings if warning is not None]


def _learning_rate_warning(training: TrainingSettings) -> str | None:
    # Other optimizers are given by their import path, and some of them need such rates.
    is_usual = training.optimizer == "prodigy" or training.optimizer not in OPTIMIZERS
    if is_usual or training.learning_rate < HIGH_LEARNING_RATE:
        return None
    return (
        f"training.learning_rate: {training.learning_rate:g} is for optimizers that scale it, such as "
        f"prodigy; {training.optimizer} usually gets 1e-5 to 1e-3"
    )


def memory_warning(training: TrainingSettings) -> str | None:
    """Return a warning about settings that take more memory than without quantisation, or None."""
    # The backward pass of torchao's layers needs their unpacked weights. Without gradient checkpointing,
    # autograd keeps the unpacked weights of all layers until then (FAILURES G02).
    is_kept = training.quantize not in ("none", "nf4") and training.compute == "none"
    if not is_kept or training.gradient_checkpointing:
        return None
    return (
        f"training.quantize: {training.quantize} without gradient checkpointing takes more memory than none, "
        "because every layer keeps its unpacked weights for the backward pass: set "
        "training.gradient_checkpointing: true"
    )
