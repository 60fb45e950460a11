"""The model of a dataset's captions, a vision-language model or a tagger: folder, fingerprint and dtype."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.captions.examples import examples_of
from pipeline.captions.tags import read_tags, require_known
from pipeline.models.captioner_folder import captioner_part, resolve_captioner
from pipeline.models.diffusers_folder import read_json
from pipeline.models.fingerprints import Fingerprints
from pipeline.models.hub import snapshot_commit
from pipeline.recipe import shareable_path
from pipeline.versions import CAPTIONER_VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.cache.recipe_entries import RecipeEntries
    from pipeline.recipe import CaptionSettings

_DTYPES = ("float32", "bfloat16", "float16")


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
    where = f"{entries.recipe.source}, datasets[].captions"
    folder = resolve_captioner(settings, where=where, log=entries.log)
    part = captioner_part(settings, folder)
    fingerprint = Fingerprints(entries.machine_state_dir, log=entries.log).of([part])
    if settings.tagger is not None:
        require_known(settings.tagger, read_tags(folder), where=where)
        return CaptionModel(folder, fingerprint, "float32")
    return CaptionModel(folder, fingerprint, dtype_of(settings, folder), examples_of(settings, where=where))


def model_record(model: CaptionModel, settings: CaptionSettings, datasets: Sequence[str]) -> dict[str, Any]:
    """Return what names the model of these datasets' captions in reports and in the provenance of LoRAs."""
    assert settings.model is not None, "the recipe requires it"
    record = {
        "model": shareable_path(settings.model),
        # Of a branch or a tag, the commit that was used.
        "revision": snapshot_commit(model.folder) or settings.revision,
        "fingerprint": model.fingerprint,
        "version": CAPTIONER_VERSION,
        "datasets": sorted(datasets),
    }
    if settings.tagger is not None:
        # A vocabulary may have thousands of tags; the recipe has it.
        return {**record, "tagger": settings.tagger.model_dump(exclude={"vocabulary", "exclude"})}
    return {**record, "prompt": settings.prompt, "dtype": model.dtype, "quantize": settings.quantize}


def dtype_of(settings: CaptionSettings, folder: Path) -> str:
    """Return the dtype in which a vision-language model runs, never "auto"."""
    return _stated_dtype(folder) if settings.dtype == "auto" else settings.dtype


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
