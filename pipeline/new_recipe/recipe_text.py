"""A first recipe for images, from their folder or another trainer's configuration, and the base model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from pipeline.errors import RUN_RECIPE, DatasetError, LatentlineError, counted
from pipeline.models.diffusers_folder import index_file, read_json
from pipeline.models.families import detect
from pipeline.new_recipe.draft import (
    DEFAULT_CAPTION,
    DatasetDraft,
    RecipeDraft,
    dataset_names,
    draft_from_folder,
    draft_from_table,
)
from pipeline.new_recipe.foreign_configs import FORMS
from pipeline.new_recipe.foreign_datasets import draft_from_config
from pipeline.new_recipe.one_file_captions import CAPTION_COLUMNS, TABLE_SUFFIXES
from pipeline.recipe import in_project, path_in_recipe, recipes_dir
from pipeline.recipe.validators import MANIFEST_SUFFIXES

# They are accumulated one by one, which takes the least memory.
BATCH = 4
"""Samples per optimizer step."""

USUAL_RESOLUTION = 1024
"""Resolution for models with an unknown resolution."""

_VIEWS = 100
"""Number of times that each image should be shown."""

_MIN_STEPS, _MAX_STEPS, _STEPS_MULTIPLE = 300, 3000, 50

CONFIG_SUFFIXES = (".json", ".yaml", ".yml", ".toml")
"""Suffixes of the configuration files of other trainers."""

_VAE_FACTOR = 8

_RESOLUTION_BY_NAME = {
    "stable-diffusion-2-1-base": 512,
    "stable-diffusion-2-base": 512,
    "stable-diffusion-2": 768,
    "stable-diffusion-v1": 512,
    "sd-v1": 512,
    "v1-5": 512,
    "v1-4": 512,
    "sd15": 512,
    "sd1.5": 512,
}
"""Part of a model's name to its resolution; the first match counts."""


class ModelResolution(NamedTuple):
    """Resolution in pixels, step of the bucket sizes, and a comment on where the resolution comes from."""

    resolution: int
    step: int
    comment: str


def draft_recipe(images: Path, *, max_references: int | None = None) -> RecipeDraft:
    """Return a draft of the recipe for a folder of images, or another trainer's configuration file."""
    if images.is_dir():
        return draft_from_folder(images)
    suffix = images.suffix.lower() if images.is_file() else ""
    if suffix in MANIFEST_SUFFIXES:
        draft = draft_from_table(images)
        if draft is None:
            columns = ", ".join(CAPTION_COLUMNS)
            raise DatasetError(
                "the manifest names no image next to it, or has no captions",
                where=f"--images, resolved to {images.absolute()}",
                fix=f"put it into the folder of its images, and name the column of captions one of {columns}",
            )
        return draft
    if suffix in CONFIG_SUFFIXES:
        # A JSON file holds either captions or a configuration, whose reader reports a file that is damaged.
        with suppress(DatasetError):
            if suffix == ".json" and (draft := draft_from_table(images)) is not None:
                return draft
        return draft_from_config(images, max_references=max_references)
    raise DatasetError(
        f"{images} is not a folder" if images.exists() else f"the folder {images} does not exist",
        where=f"--images, resolved to {images.absolute()}",
        fix="pass the folder that contains the images, a file with their captions "
        f"({', '.join(TABLE_SUFFIXES)}), or {FORMS}",
    )


def model_resolution(base: str) -> ModelResolution:
    """Return the resolution that a local folder or Hub id was trained at, without using the network."""
    folder = in_project(base)
    if index_file(folder).is_file():
        return _resolution_of_folder(folder)
    config = _downloaded_unet_config(base)
    if config is not None and (edge := read_json(config).get("sample_size")):
        return _with_step(int(edge) * _VAE_FACTOR, "the UNet's resolution")
    name = base.lower()
    resolution = next((edge for part, edge in _RESOLUTION_BY_NAME.items() if part in name), USUAL_RESOLUTION)
    return _with_step(resolution, "usual for such models; change it if yours differs")


def accepted_references(base: str) -> int | None:
    """Return how many references of an image a base model accepts; None if it is not in a local folder."""
    folder = in_project(base)
    if not index_file(folder).is_file():
        return None
    try:
        spec = detect(folder).spec.references
    except LatentlineError:  # loading the recipe reports what is wrong with the model
        return None
    return 0 if spec is None else spec.max_number


def _resolution_of_folder(folder: Path) -> ModelResolution:
    try:
        family = detect(folder)
        edge = family.denoiser_config.get("sample_size") if family.spec.denoiser_name == "unet" else None
        multiple = family.size_multiple()
    except LatentlineError:  # loading the recipe reports what is wrong with the model
        return _with_step(USUAL_RESOLUTION, "usual")
    if edge:
        return _with_step(int(edge) * family.vae_factor, "the UNet's resolution", multiple)
    return _with_step(USUAL_RESOLUTION, "usual for such models", multiple)


def _with_step(resolution: int, comment: str, multiple: int = 8) -> ModelResolution:
    # A resolution must be a multiple of the step.
    step = 64 if resolution % 64 == 0 and resolution >= 256 else multiple
    return ModelResolution(resolution, step, comment)


def _downloaded_unet_config(base: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(base, "unet/config.json")
    except HFValidationError:
        return None
    return Path(path) if isinstance(path, str) else None


def recipe_text(name: str, draft: RecipeDraft, base: str, size: ModelResolution) -> str:
    """Return a recipe for the images of `draft` as YAML, with comments that explain its values."""
    num_images = draft.num_images
    wanted_steps = round(_VIEWS * num_images / BATCH / _STEPS_MULTIPLE) * _STEPS_MULTIPLE
    steps = min(max(wanted_steps, _MIN_STEPS), _MAX_STEPS)
    views = counted(max(round(steps * BATCH / num_images), 1), "time")
    prompts = (each.preview_prompt() for each in draft.datasets)
    prompt = next(filter(None, prompts), DEFAULT_CAPTION)
    return f"""\
# yaml-language-server: $schema=recipe.schema.json
#
# Written by `latentline new`. docs/recipes.md lists all keys. Run these two commands first:
#   latentline plan {name}
#   {RUN_RECIPE} {name}

datasets:
{_datasets_text(name, draft.datasets, size)}
cache_dir: .cache/latentline           # latents and text embeddings; recipes can share it
output_dir: outputs/{name}

model:
  base: {_quoted(base)}

{_buckets_text(draft, size)}
{_sections_text(draft)}
training:
  steps: {steps}                          # shows each image about {views}
  batch_size: 1
  gradient_accumulation: {BATCH}             # like a batch of {BATCH}, in the memory of one
  gradient_checkpointing: true         # less memory, about a third more time, the same gradients
  learning_rate: 1.0e-4
  checkpoint_every: 250
  sample_every: 250                    # steps between previews of these prompts
  sample_prompts: [{_quoted(prompt)}]
  lora: {{rank: 16, alpha: 16.0}}

accelerate: {{num_processes: 1, mixed_precision: bf16}}   # use fp16 on GPUs before Ampere
"""


def rounded_resolutions(resolutions: Sequence[int], size: ModelResolution) -> list[int]:
    """Return each resolution as the nearest multiple of the step, without duplicates, in ascending order."""
    return sorted({max(round(each / size.step), 1) * size.step for each in resolutions})


def resolution_remarks(draft: RecipeDraft, size: ModelResolution) -> list[str]:
    """Return a line for the terminal for each resolution of the recipe that differs from the draft's."""
    all_given = {"buckets.resolution": draft.keys.get("buckets.resolution", [])}
    all_given |= {f"{each.name}: resolution": each.keys.get("resolution", []) for each in draft.datasets}
    remarks: list[str] = []
    for key, given in all_given.items():
        rounded = rounded_resolutions(given, size)
        if rounded != sorted(given):
            shown, before = (", ".join(map(str, each)) for each in (rounded, given))
            remarks.append(
                f"{key}: {shown} instead of {before}, because it must be a multiple of {size.step}"
            )
    return remarks


def _datasets_text(recipe_name: str, datasets: Sequence[DatasetDraft], size: ModelResolution) -> str:
    names = dataset_names((each.name for each in datasets), otherwise=recipe_name)
    lines: list[str] = []
    for name, each in zip(names, datasets, strict=True):
        captions, manifest = each.captions(), manifest_of(recipe_name, name, each)
        path = _quoted(path_in_recipe(manifest or each.images.folder))
        lines += [
            f"  - name: {_quoted(name)}",
            f"    path: {path}   # {counted(each.images.num_images, 'image')}",
        ]
        if manifest is not None and manifest.parent != each.images.folder:
            lines.append(f"    images: {_quoted(path_in_recipe(each.images.folder))}")
        lines += [f"    exclude: {_yaml(list(each.images.exclude))}"] if each.images.exclude else []
        others = {key: value for key, value in each.keys.items() if not key.startswith("captions.")}
        if "resolution" in others:
            resolutions = rounded_resolutions(others.pop("resolution"), size)
            others |= {"resolutions": resolutions} if len(resolutions) > 1 else {"resolution": resolutions[0]}
        lines += [
            f"    {key}: {_yaml(value)}" for key, value in others.items() if (key, value) != ("repeats", 1)
        ]
        lines.append(f"    captions: {_yaml(captions)}{_captions_comment(each, captions)}")
    return "\n".join(lines) + "\n"


def manifest_of(recipe_name: str, dataset_name: str, dataset: DatasetDraft) -> Path | None:
    """Return the manifest of a dataset: its file of captions or a new one next to the recipe, or None."""
    if dataset.table is None or dataset.table.is_manifest:
        return dataset.table and dataset.table.file
    return recipes_dir() / f"{recipe_name}_{dataset_name}_captions.jsonl"


def new_manifests(recipe_name: str, draft: RecipeDraft) -> dict[Path, str]:
    """Return the text of each manifest that the recipe needs, for files of captions in another form."""
    names = dataset_names((each.name for each in draft.datasets), otherwise=recipe_name)
    return {
        manifest: each.table.manifest_text()
        for name, each in zip(names, draft.datasets, strict=True)
        if each.table is not None
        and not each.table.is_manifest
        and (manifest := manifest_of(recipe_name, name, each)) is not None
    }


def _captions_comment(dataset: DatasetDraft, captions: Mapping[str, Any]) -> str:
    images = dataset.images
    if captions["from"] == "fixed" and "captions.from" not in dataset.keys:
        return "   # no caption files were found: one caption for all images"
    missing = images.num_images - images.num_captions
    if captions["from"] != "sidecar" or not missing or "fallback" in captions:
        return ""
    return f"   # {missing:,} of them have none: write them, or set fallback"


def _buckets_text(draft: RecipeDraft, size: ModelResolution) -> str:
    given = draft.keys.get("buckets.resolution")
    buckets: dict[str, Any] = {"resolution": size.resolution, "step": size.step}
    comment = size.comment
    if given:
        resolutions = rounded_resolutions(given, size)
        comment = "as before" if resolutions == sorted(given) else f"before: {', '.join(map(str, given))}"
        buckets["resolution"] = resolutions[0]
        if len(resolutions) > 1:
            buckets = {"resolutions": resolutions, "per_image": "each", "step": size.step}
    elif any(len(rounded_resolutions(each.keys.get("resolution", []), size)) > 1 for each in draft.datasets):
        buckets["per_image"] = "each"
    return f"buckets: {_yaml({**buckets, **_section(draft, 'buckets')})}   # {comment}"


def _sections_text(draft: RecipeDraft) -> str:
    sections = {name: {"compute_dtype": "auto", **_section(draft, name)} for name in ("latents", "text")}
    return "".join(f"{name}: {_yaml(section)}\n" for name, section in sections.items())


def _section(draft: RecipeDraft, name: str) -> dict[str, Any]:
    # The resolution is written by `_buckets_text`.
    keys = {key.partition(".")[2]: value for key, value in draft.keys.items() if key.startswith(f"{name}.")}
    return {key: value for key, value in keys.items() if key != "resolution"}


def _yaml(value: Any) -> str:
    """Return plain data as YAML on one line."""
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return "{" + ", ".join(f"{key}: {_yaml(each)}" for key, each in items) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_yaml(each) for each in cast("list[Any]", value)) + "]"
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def _quoted(text: str) -> str:
    is_plain = re.fullmatch(r"[A-Za-z./][A-Za-z0-9_./-]*", text)

    # Some parsers read these words as null or as booleans.
    is_keyword = text.lower() in {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}
    return text if is_plain and not is_keyword else json.dumps(text, ensure_ascii=False)
