"""A first recipe for a folder of images, drafted from its file names and from the base model's resolution."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pipeline.errors import EXECUTE_JOB, DatasetError, LatentlineError, counted
from pipeline.images.formats import SUFFIXES
from pipeline.models.diffusers_folder import read_json
from pipeline.models.families import detect
from pipeline.recipe import in_project, path_in_recipe

BATCH = 4
"""Samples per optimizer step. They are accumulated one by one, which takes the least memory."""

USUAL_RESOLUTION = 1024
"""Resolution of models whose own resolution is unknown."""

_VIEWS = 100
"""Number of times that each image should be shown."""

_MIN_STEPS, _MAX_STEPS, _STEPS_MULTIPLE = 300, 3000, 50

_TEXT_SUFFIXES = (".txt", ".caption", ".captions", ".cap")
"""Ends of the names of caption files; `.caption.txt` ends in one of them."""

_REPEATS_FOLDER = re.compile(r"(\d{1,4})_(.+)")
"""Sub-folder in the layout of sd-scripts: the repeats of its images and their caption."""

_MAX_PROMPT = 200

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


@dataclass(frozen=True)
class ImageFolder:
    """Folder of images that becomes one dataset.

    Attributes:
        folder: Folder that is searched recursively.
        num_images: Number of files with an image suffix.
        suffix: Most frequent suffix of the caption files; None if no image has one.
        num_captions: Number of images with a caption file of that suffix.
        prompt: First line of one caption; empty if there is none.
        repeats: Repeats in the name of an sd-scripts folder; otherwise 1.
        text: Caption in the name of such a folder; otherwise empty.
    """

    folder: Path
    num_images: int
    suffix: str | None
    num_captions: int
    prompt: str
    repeats: int = 1
    text: str = ""


class ModelResolution(NamedTuple):
    """Resolution in pixels, step of the bucket sizes, and a comment on where the resolution comes from."""

    resolution: int
    step: int
    comment: str


def scan_images(folder: Path) -> list[ImageFolder]:
    """Return the folder as one dataset, or one dataset per sub-folder if it has the layout of sd-scripts.

    Raises:
        DatasetError: The folder does not exist, is not a folder, or contains no images.
    """
    if not folder.is_dir():
        raise DatasetError(
            f"{folder} is not a folder" if folder.exists() else f"the folder {folder} does not exist",
            where=f"--images, resolved to {folder.absolute()}",
            fix="pass the folder that contains the images; to use a manifest (.parquet, .jsonl, .csv), copy "
            "a recipe from configs/examples and set datasets[].path",
        )
    complete = _scan_folder(folder)
    if complete.num_images == 0:
        raise DatasetError(
            "the folder contains no images",
            where=str(folder.absolute()),
            fix="pass another folder; images have suffixes such as jpg, png, webp, tiff or heic",
        )

    # Sub-folders become datasets only if they contain all images.
    sub_folders = sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    named = [(each, match) for each in sub_folders if (match := _REPEATS_FOLDER.fullmatch(each.name))]
    parts = [_scan_folder(each, int(match[1]), match[2]) for each, match in named]
    parts = [part for part in parts if part.num_images]
    return parts if sum(part.num_images for part in parts) == complete.num_images else [complete]


def _scan_folder(folder: Path, repeats: int = 1, text: str = "") -> ImageFolder:
    num_images = 0
    num_captions = Counter[str]()
    first_caption: dict[str, Path] = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        visible = sorted(name for name in names if not name.startswith("."))
        stems = {name.rpartition(".")[0] for name in visible if name.rpartition(".")[2].lower() in SUFFIXES}
        num_images += sum(name.rpartition(".")[2].lower() in SUFFIXES for name in visible)
        for suffix, name in _caption_files(visible, stems):
            num_captions[suffix] += 1
            first_caption.setdefault(suffix, Path(parent) / name)

    suffix, number = max(
        num_captions.items(), key=lambda each: (each[1], each[0] == ".txt"), default=(None, 0)
    )
    prompt = _first_line(first_caption[suffix]) if suffix else ""
    return ImageFolder(
        folder, num_images, suffix, number, prompt, repeats=max(repeats, 1), text=text.replace("_", " ")
    )


def _caption_files(names: Iterable[str], image_stems: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (suffix, name) of each text file that has the stem of an image; the suffix may have two parts."""
    for name in names:
        if not name.lower().endswith(_TEXT_SUFFIXES):
            continue
        dots = [index for index, letter in enumerate(name) if letter == "." and index]
        suffix = next((name[dot:] for dot in dots if name[:dot] in image_stems), None)
        if suffix is not None:
            yield suffix, name


def _first_line(file: Path) -> str:
    """Return the file's first line if it can be read and is short enough for a prompt, else no text."""
    try:
        with file.open(encoding="utf-8-sig", errors="strict") as opened:
            line = opened.readline(_MAX_PROMPT + 1).strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return line if len(line) <= _MAX_PROMPT and line.isprintable() else ""


def model_resolution(base: str) -> ModelResolution:
    """Return the resolution that a local folder or Hub id was trained at, without using the network."""
    folder = in_project(base)
    if (folder / "model_index.json").is_file():
        return _resolution_of_folder(folder)
    config = _downloaded_unet_config(base)
    if config is not None and (edge := read_json(config).get("sample_size")):
        return _with_step(int(edge) * _VAE_FACTOR, "the UNet's resolution")
    name = base.lower()
    resolution = next((edge for part, edge in _RESOLUTION_BY_NAME.items() if part in name), USUAL_RESOLUTION)
    return _with_step(resolution, "usual for such models; change it if yours differs")


def _resolution_of_folder(folder: Path) -> ModelResolution:
    try:
        family = detect(folder)
        edge = family.denoiser_config.get("sample_size") if family.denoiser_name == "unet" else None
        multiple = family.size_multiple()
    except LatentlineError:  # loading the recipe reports what is wrong with the model
        return _with_step(USUAL_RESOLUTION, "usual")
    if edge:
        return _with_step(int(edge) * family.vae_factor, "the UNet's resolution", multiple)
    return _with_step(USUAL_RESOLUTION, "usual for such models", multiple)


def _with_step(resolution: int, comment: str, multiple: int = 8) -> ModelResolution:
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


def recipe_text(name: str, folders: Sequence[ImageFolder], base: str, size: ModelResolution) -> str:
    """Return the recipe as YAML, with a comment on each value that was chosen."""
    num_images = sum(each.num_images for each in folders)
    wanted_steps = round(_VIEWS * num_images / BATCH / _STEPS_MULTIPLE) * _STEPS_MULTIPLE
    steps = min(max(wanted_steps, _MIN_STEPS), _MAX_STEPS)
    views = counted(max(round(steps * BATCH / num_images), 1), "time")
    prompt = next((each.prompt for each in folders if each.prompt), "") or folders[0].text or "a photograph"
    return f"""\
# yaml-language-server: $schema=recipe.schema.json
#
# Written by `latentline new`. docs/recipes.md lists all keys. Run these two commands first:
#   latentline plan {name}
#   {EXECUTE_JOB} {name}_train

datasets:
{_datasets_text(name, folders)}
cache_dir: .cache/latentline           # latents and text embeddings; recipes can share it
output_dir: outputs/{name}

model:
  base: {_quoted(base)}

buckets: {{resolution: {size.resolution}, step: {size.step}}}   # {size.comment}

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


def _datasets_text(recipe_name: str, folders: Sequence[ImageFolder]) -> str:
    names: set[str] = set()
    lines: list[str] = []
    for each in folders:
        name = re.sub(r"[^A-Za-z0-9_-]+", "_", each.text or each.folder.resolve().name).strip("_")
        name = name or recipe_name
        while name in names:
            name += "_"
        names.add(name)

        path = _quoted(path_in_recipe(each.folder))
        lines += [f"  - name: {_quoted(name)}", f"    path: {path}   # {counted(each.num_images, 'image')}"]
        lines += [f"    repeats: {each.repeats}"] if each.repeats > 1 else []
        lines.append(f"    captions: {_captions_text(each)}")
    return "\n".join(lines) + "\n"


def _captions_text(folder: ImageFolder) -> str:
    if folder.suffix is None:
        text = _quoted(folder.text or "a photograph")
        return f"{{from: fixed, text: {text}}}   # no caption files were found: one caption for all images"
    missing = folder.num_images - folder.num_captions
    comment = f"   # {missing:,} of them have none: write them, or see checks.allow" if missing else ""
    return f"{{from: sidecar, suffix: {_quoted(folder.suffix)}}}{comment}"


def _quoted(text: str) -> str:
    """Return the text as YAML, unquoted if that is safe."""
    is_plain = re.fullmatch(r"[A-Za-z./][A-Za-z0-9_./-]*", text)
    is_keyword = text.lower() in {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}
    return text if is_plain and not is_keyword else json.dumps(text, ensure_ascii=False)
