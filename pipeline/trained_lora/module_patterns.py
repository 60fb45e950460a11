"""Patterns of modules in `training.lora`, compared with the layers of a base model without loading it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from pipeline.errors import ModelError, TrainingError
from pipeline.models.diffusers_folder import stored_shapes, weight_files

if TYPE_CHECKING:
    from pipeline.models.families import Family
    from pipeline.recipe import LoraSettings

_MAX_NEAR = 3
"""Maximum number of layers that an error suggests for a pattern."""

_LAYER = ".weight"
_LAYER_DIMENSIONS = (2, 4)
"""Numbers of dimensions of the weights of linear layers and convolutions."""


def given_patterns(settings: LoraSettings) -> list[tuple[str, str]]:
    """Return each pattern of a recipe with its key below `training.lora`."""
    return [
        *(("modules", pattern) for pattern in settings.modules),
        *(("ranks", each.modules) for each in settings.ranks),
        *(("learning_rates", each.modules) for each in settings.learning_rates),
    ]


def require_module_patterns(settings: LoraSettings, family: Family) -> None:
    """Raise TrainingError, with similar layers, for patterns that match no layer of the base model.

    Layers are named by the headers of its weights. Models whose weights are pickles are not checked.
    """
    patterns = given_patterns(settings)
    layers = _layers(family) if patterns else []
    # The names in a file that an unknown program has written may differ from those in the model.
    if not any(name.endswith(tuple(family.lora_targets())) for name in layers):
        return

    unmatched = [(key, each) for key, each in patterns if not any(fnmatchcase(name, each) for name in layers)]
    if unmatched:
        raise unmatched_error(unmatched, layers, where=f"training.lora, {family.spec.denoiser_name}")


def unmatched_error(
    unmatched: Sequence[tuple[str, str]], layers: Sequence[str], *, where: str
) -> TrainingError:
    """Return the error for patterns, each with its key, that match none of the layers."""
    fixes = [f"for {pattern} write a pattern such as {_near(pattern, layers)}" for _, pattern in unmatched]
    what = "; ".join(f"training.lora.{key}: the pattern {each} matches no layer" for key, each in unmatched)
    return TrainingError(what, where=where, fix="; ".join(fixes))


def _layers(family: Family) -> list[str]:
    """Return the dotted paths of the denoiser's linear layers and convolutions, and perhaps of embeddings."""
    try:
        files = weight_files(family.model.component(family.spec.denoiser_name))
    except ModelError:  # `check_local_base` reports missing files
        return []
    return [
        name.removesuffix(_LAYER)
        for name, shape in stored_shapes(files).items()
        if name.endswith(_LAYER) and len(shape) in _LAYER_DIMENSIONS
    ]


def _near(pattern: str, layers: Sequence[str]) -> str:
    """Return patterns that match layers and resemble `pattern`, the most similar first."""
    # Blocks of one kind differ in their number only, so one path stands for all of them.
    paths = list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in layers))

    # The part that no layer contains is misspelled, such as to_qq, and the rest of the pattern is right.
    wrong = next((part for part in pattern.split("*") if not any(part in name for name in layers)), pattern)
    text = wrong.strip(".")
    num_names = text.count(".") + 1
    pieces = {
        ".".join(names[start : start + num_names]): None
        for names in (path.split(".") for path in paths)
        for start in range(len(names) - num_names + 1)
    }
    close = difflib.get_close_matches(text, pieces, n=_MAX_NEAR)
    corrected = [pattern.replace(text, each) for each in close]
    matching = [each for each in corrected if any(fnmatchcase(name, each) for name in layers)]
    return ", ".join(matching or difflib.get_close_matches(pattern, paths, n=_MAX_NEAR, cutoff=0.0))
