"""Scorers: models that turn pictures and texts into features, whose similarities are the scores.

Names in a recipe stand for classes of transformers, see `worker/transformers_scorer.py`. Any other scorer is
a class that satisfies `Scorer`, given by its import path.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from pipeline.errors import EvaluationError, ModelError
from pipeline.models.diffusers_folder import tokenizer_files, weight_files
from pipeline.models.fingerprints import Fingerprints, ModelPart
from pipeline.models.transformers_folder import resolve_folder
from pipeline.recipe import project_root
from pipeline.recipe.evaluation import SCORERS, ScorerSettings
from pipeline.recipe.untrusted import is_untrusted
from pipeline.versions import FEATURES_VERSION

if TYPE_CHECKING:
    from PIL.Image import Image

    from pipeline.cache.recipe_entries import RecipeEntries

Features = npt.NDArray[np.float32]
"""Float array (N, D), one row per picture or text."""

READS_TEXTS = {"dino": False, "clip": True, "siglip": True}
"""Whether each scorer of Latentline reads texts."""

_PROCESSOR = "preprocessor_config.json"


class Scorer(Protocol):
    """A model that turns pictures and texts into features.

    The class of an import path is created without arguments, or with `weights` if the recipe gives some. The
    process of the stage reads the two attributes, and a launched process calls the methods. So the module
    and the constructor should not import torch; the methods may.

    Attributes:
        fingerprint: Text that changes with everything that decides the features, such as a hash of weights.
        reads_texts: Whether `text_features` returns features; otherwise it is never called.
    """

    fingerprint: str
    reads_texts: bool

    def picture_features(self, images: Sequence[Image], /) -> Features:
        """Return the features of RGB pictures, which must not depend on the other pictures."""
        ...

    def text_features(self, texts: Sequence[str], /) -> Features | None:
        """Return the features of texts in the same space, or None if the scorer reads no texts."""
        ...


@dataclass(frozen=True)
class ResolvedScorer:
    """A scorer of a recipe that is ready to be used.

    Attributes:
        name: Name or import path in the recipe.
        weights: Folder of the weights, or the recipe's text for an import path; "" for none.
        fingerprint: Hash of everything that decides the features.
    """

    name: str
    weights: str
    fingerprint: str
    reads_texts: bool


def resolve_scorers(entries: RecipeEntries, settings: Iterable[ScorerSettings]) -> list[ResolvedScorer]:
    """Return the scorers of an evaluation; weights that are not on this machine are downloaded.

    Raises:
        EvaluationError: An import path is not the class of a scorer.
        ModelError: Weights are missing, incomplete, or cannot be downloaded.
    """
    return [
        _resolve_import(each) if each.is_import_path else _resolve_weights(entries, each) for each in settings
    ]


def load_import(name: str, weights: str) -> Scorer:
    """Return the scorer of an import path `module:Class`.

    Raises:
        EvaluationError: It cannot be imported, or lacks a part of `Scorer`.
    """
    where = "evaluation.scorers"
    # Recipes are checked when they are loaded; this also covers orders and values from elsewhere.
    if is_untrusted():
        what = f"the scorer {name} is an import path, which LATENTLINE_UNTRUSTED forbids"
        raise EvaluationError(what, where=where, fix=f"use {', '.join(SCORERS)}")

    module, _, class_name = name.partition(":")
    # A package of the project, such as demo, is found from any working directory.
    if str(project_root()) not in sys.path:
        sys.path.append(str(project_root()))
    try:
        found: Any = getattr(importlib.import_module(module), class_name)
        scorer: Any = found(weights=weights) if weights else found()
    # Any code of the module may fail in any way.
    except Exception as err:
        raise EvaluationError(
            f"the scorer {name} cannot be created: {type(err).__name__}: {err}",
            where=where,
            fix="correct the import path module:Class, install its package, or correct its weights",
        ) from err

    missing = [
        attribute
        for attribute in ("fingerprint", "reads_texts", "picture_features", "text_features")
        if not hasattr(scorer, attribute)
    ]
    if missing:
        what = f"the scorer {name} has no {missing[0]}"
        raise EvaluationError(what, where=where, fix="see the protocol of scorers in docs/evaluation.md")
    return scorer


def _resolve_import(settings: ScorerSettings) -> ResolvedScorer:
    scorer = load_import(settings.name, settings.weights or "")
    fingerprint = f"{settings.name} {scorer.fingerprint}"
    return ResolvedScorer(settings.name, settings.weights or "", fingerprint, bool(scorer.reads_texts))


def _resolve_weights(entries: RecipeEntries, settings: ScorerSettings) -> ResolvedScorer:
    name, where = settings.name, f"{entries.recipe.source}, evaluation.scorers"
    weights = settings.weights or SCORERS[name]
    folder = resolve_folder(
        weights,
        settings.revision,
        lambda folder: _part(name, folder),
        key="weights",
        where=where,
        log=entries.log,
    )
    part = _part(name, folder)
    fingerprint = Fingerprints(entries.machine_state_dir, log=entries.log).of([part])
    return ResolvedScorer(name, str(folder), f"{FEATURES_VERSION} {fingerprint}", READS_TEXTS[name])


def _part(name: str, folder: Path) -> ModelPart:
    """Return the files of a scorer; raises ModelError if one is missing or is a pickle."""
    configs = [folder / "config.json", folder / _PROCESSOR]
    missing = next((file for file in configs if not file.is_file()), None)
    if missing is not None:
        fix = "set weights to a complete folder or repository in the format of transformers"
        raise ModelError(f"the scorer {name} has no {missing.name}", where=str(folder), fix=fix)

    contents = list(weight_files(folder))
    if any(".bin" in file.suffixes for file in contents):
        what = f"weights of the scorer {name} must be *.safetensors, got a pickle, which can run code"
        raise ModelError(what, where=str(folder), fix="use weights or a revision with safetensors")
    if READS_TEXTS[name]:
        tokenizer_configs, vocabularies = tokenizer_files(folder)
        configs += tokenizer_configs
        contents += vocabularies
    return ModelPart(name, tuple(configs), tuple(contents))
