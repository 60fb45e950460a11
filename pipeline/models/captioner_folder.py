"""Folders of captioning models: vision-language models in the format of transformers, and taggers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import ModelError
from pipeline.models.diffusers_folder import tokenizer_files, weight_files
from pipeline.models.fingerprints import ModelPart
from pipeline.models.transformers_folder import resolve_folder

if TYPE_CHECKING:
    from pipeline.log import Log
    from pipeline.recipe import CaptionSettings

ONNX_FILE = "model.onnx"
"""File of a tagger's weights."""

TAGS_FILE = "selected_tags.csv"
"""File of a tagger's tags."""

_CONFIGS = ("generation_config.json", "processor_config.json", "preprocessor_config.json")
"""Configurations that not every model has; all of them decide what a model writes."""

_COMPLETE = "set captions.model to a complete folder or repository in the format of transformers"


def resolve_captioner(settings: CaptionSettings, *, where: str, log: Log) -> Path:
    """Return the folder of the model of captions; it is downloaded if it is not here.

    Raises:
        ModelError: The model is missing, incomplete, or cannot be downloaded.
    """
    assert settings.model is not None, "the recipe requires it"
    return resolve_folder(
        settings.model,
        settings.revision,
        _captioner_part if settings.tagger is None else _tagger_part,
        key="captions.model",
        where=where,
        log=log,
        files=None if settings.tagger is None else (ONNX_FILE, TAGS_FILE),
    )


def resolve_configs(settings: CaptionSettings, *, where: str) -> Path:
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


def captioner_part(settings: CaptionSettings, folder: Path) -> ModelPart:
    """Return the files of the model of captions; raises ModelError if one is missing or is a pickle."""
    return _captioner_part(folder) if settings.tagger is None else _tagger_part(folder)


def _captioner_part(folder: Path) -> ModelPart:
    config = folder / "config.json"
    if not config.is_file():
        is_tagger = (folder / ONNX_FILE).is_file()
        fix = "add captions.tagger: {}, if the model is a tagger" if is_tagger else _COMPLETE
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
    files = (folder / ONNX_FILE, folder / TAGS_FILE)
    missing = next((file.name for file in files if not file.is_file()), None)
    if missing is not None:
        needed = f"a folder or repository with {ONNX_FILE} and {TAGS_FILE}"
        fix = f"set captions.model to {needed}, or remove captions.tagger"
        raise ModelError(f"the tagger has no {missing}", where=str(folder), fix=fix)
    return ModelPart("tagger", (), files)


def _require_configs(folder: Path) -> None:
    names = ("config.json", "tokenizer_config.json")
    missing = next((name for name in names if not (folder / name).is_file()), None)
    if missing is not None or not any((folder / name).is_file() for name in _CONFIGS[1:]):
        what = f"the captioning model has no {missing or _CONFIGS[-1]}"
        raise ModelError(what, where=str(folder), fix=_COMPLETE)
