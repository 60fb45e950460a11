"""The model of a dataset's captions, a vision-language model or a tagger: folder, fingerprint and dtype."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.captions.examples import examples_of
from pipeline.captions.tags import TAGS_FILE, read_tags, require_known
from pipeline.errors import ModelError
from pipeline.models.diffusers_folder import read_json, tokenizer_files, weight_files
from pipeline.models.fingerprints import Fingerprints, ModelPart
from pipeline.models.transformers_folder import resolve_folder

if TYPE_CHECKING:
    from pipeline.cache.recipe_entries import RecipeEntries
    from pipeline.recipe import CaptionSettings

ONNX_FILE = "model.onnx"
"""File of a tagger's weights."""

_DTYPES = ("float32", "bfloat16", "float16")

_CONFIGS = ("generation_config.json", "processor_config.json", "preprocessor_config.json")
"""Configurations that not every model has; all of them decide what a model writes."""


@dataclass(frozen=True)
class CaptionModel:
    """A model that is ready to be used.

    Attributes:
        folder: Its folder, in the format of transformers, or of a tagger.
        fingerprint: Hash of its configurations, tokenizer, chat template and weights; of a tagger, of its
            tags and weights.
        dtype: Dtype in which it runs, never "auto".
        examples: See `examples_of`.
    """

    folder: Path
    fingerprint: str
    dtype: str
    examples: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def resolve_model(entries: RecipeEntries, settings: CaptionSettings) -> CaptionModel:
    """Return the model of a dataset with `captions.from: model`; it is downloaded if it is not here.

    Raises:
        DatasetError: The image of an example cannot be used.
        ModelError: The model is missing, incomplete, or cannot be downloaded; or the recipe names tags that
            it does not have.
    """
    assert settings.model is not None, "the recipe requires it"
    where = f"{entries.recipe.source}, datasets[].captions"
    part_of = _part if settings.tagger is None else _tagger_part
    folder = resolve_folder(
        settings.model,
        settings.revision,
        part_of,
        key="captions.model",
        where=where,
        log=entries.log,
        files=None if settings.tagger is None else (ONNX_FILE, TAGS_FILE),
    )
    fingerprint = Fingerprints(entries.machine_state_dir, log=entries.log).of([part_of(folder)])
    if settings.tagger is not None:
        require_known(settings.tagger, read_tags(folder), where=where)
        return CaptionModel(folder, fingerprint, "float32")
    return CaptionModel(folder, fingerprint, dtype_of(settings, folder), examples_of(settings, where=where))


def captioner_configs(settings: CaptionSettings, *, where: str) -> Path:
    """Return the folder of a vision-language model with at least its configurations and its tokenizer.

    Raises:
        ModelError: They are missing, or cannot be downloaded.
    """
    assert settings.model is not None, "the recipe requires it"
    return resolve_folder(
        settings.model,
        settings.revision,
        _require_configs,
        key="captions.model",
        where=where,
        log=lambda _: None,
        weights=False,
    )


def dtype_of(settings: CaptionSettings, folder: Path) -> str:
    """Return the dtype in which a vision-language model runs, never "auto"."""
    return _stated_dtype(folder) if settings.dtype == "auto" else settings.dtype


def _require_configs(folder: Path) -> None:
    names = ("config.json", "tokenizer_config.json")
    missing = next((name for name in names if not (folder / name).is_file()), None)
    if missing is not None or not any((folder / name).is_file() for name in _CONFIGS[1:]):
        what = f"the captioning model has no {missing or _CONFIGS[-1]}"
        fix = "set captions.model to a complete folder or repository in the format of transformers"
        raise ModelError(what, where=str(folder), fix=fix)


def _part(folder: Path) -> ModelPart:
    """Return the files of a captioning model; raises ModelError if one is missing or is a pickle."""
    config = folder / "config.json"
    if not config.is_file():
        fix = "set captions.model to a complete folder or repository in the format of transformers"
        if (folder / ONNX_FILE).is_file():
            fix = "add captions.tagger: {}, if the model is a tagger"
        raise ModelError("the captioning model has no config.json", where=str(folder), fix=fix)

    weights = weight_files(folder)
    if any(".bin" in file.suffixes for file in weights):
        what = "weights of the captioning model must be *.safetensors, got a pickle, which can run code"
        raise ModelError(what, where=str(folder), fix="use a model or a revision with safetensors")
    tokenizer_configs, vocabularies = tokenizer_files(folder)
    others = (folder / name for name in _CONFIGS)
    configs = (config, *(file for file in others if file.is_file()), *tokenizer_configs)
    return ModelPart("captioner", configs, (*weights, *vocabularies))


def _tagger_part(folder: Path) -> ModelPart:
    """Return the files of a tagger; raises ModelError if one is missing."""
    files = (folder / ONNX_FILE, folder / TAGS_FILE)
    missing = next((file.name for file in files if not file.is_file()), None)
    if missing is not None:
        needed = f"a folder or repository with {ONNX_FILE} and {TAGS_FILE}"
        fix = f"set captions.model to {needed}, or remove captions.tagger"
        raise ModelError(f"the tagger has no {missing}", where=str(folder), fix=fix)
    return ModelPart("tagger", (), files)


def _stated_dtype(folder: Path) -> str:
    """Return the dtype in a model's configuration, or float32."""
    config: dict[str, Any] = read_json(folder / "config.json")
    # Before transformers 5 the key was torch_dtype; models of several parts may state it for each part.
    parts = [config, config.get("text_config")]
    stated = [
        part[key]
        for part in parts
        if isinstance(part, dict)
        for key in ("dtype", "torch_dtype")
        if key in part
    ]
    return next((each for each in stated if each in _DTYPES), "float32")
