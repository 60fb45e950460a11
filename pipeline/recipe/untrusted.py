"""Restrictions on recipes from strangers, for CI that runs the recipes of pull requests.

With `LATENTLINE_UNTRUSTED=1`, a recipe may name no import path, no address and no path outside the project,
and its jobs write only below `WRITABLE`. SECURITY.md lists the limits of this variable.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pipeline.recipe.errors import Mistake
from pipeline.recipe.evaluation import SCORERS
from pipeline.recipe.keys import child
from pipeline.recipe.optimizer_classes import OPTIMIZERS
from pipeline.recipe.packed import TAR
from pipeline.recipe.settings import one_of
from pipeline.recipe.sweep import plain_key
from pipeline.recipe.validators import MANIFEST_SUFFIXES
from pipeline.recipe.yaml_document import dotted
from pipeline.storage.addresses import expanded, is_url

if TYPE_CHECKING:
    from pipeline.recipe.yaml_document import KeyPath

UNTRUSTED_VARIABLE = "LATENTLINE_UNTRUSTED"
"""Environment variable; 1 refuses recipes that run code or leave the project, 0 or nothing accepts them."""

WRITABLE = ("outputs", ".cache/latentline")
"""Folders of the project below which a stranger's recipe may write; any other could hold code or tokens."""


def _keys(section: str, names: str) -> list[str]:
    return [f"{section}.{name}" for name in names.split()]


KEYS = {
    "runs code": ["training.optimizer", "model.allow_pickle", "evaluation.scorers.name"],
    "reads a path": [
        "datasets.path",
        "datasets.images",
        "datasets.mask.path",
        "datasets.references.path",
        "datasets.captions.examples.image",
        "training.sample_prompts.references",
        "training.lora.start_from",
        "model.context_lora.path",
        "evaluation.prompts.references",
    ],
    "reads a path or the Hub": [
        "model.base",
        "model.components",
        "model.training_adapter",
        "evaluation.scorers.weights",
        "datasets.captions.model",
    ],
    "reads and writes a path": ["cache_dir", "output_dir"],
    "leaves the project": [
        "datasets.follow_links",
        "datasets.image_column",
        "training.trackers",
        "training.tracker_arguments",
    ],
    "evaluates an expression": [
        "datasets.exclude",
        "datasets.filters.where",
        "training.lora.modules",
        "training.lora.ranks.modules",
        "training.lora.learning_rates.modules",
        "recache.cron",
    ],
    "none": [
        "owners",
        "model.context_lora.scale",
        *_keys(
            "datasets",
            "name path_column focus_columns limit repeats weight role slider loss_weight resolution "
            "resolutions flip caption_dropout duplicates validation_fraction",
        ),
        *_keys(
            "datasets.captions",
            "from suffix fallback json_key text columns lines encoding fallback_encoding "
            "trigger placeholder class_words prefix postfix revision prompt when as max_tokens resolution "
            "dtype quantize",
        ),
        *_keys(
            "datasets.captions.examples",
            "caption",
        ),
        *_keys(
            "datasets.captions.tagger",
            "threshold character_threshold ratings vocabulary exclude",
        ),
        *_keys(
            "datasets.captions.replace",
            "find with whole_words ignore_case",
        ),
        *_keys(
            "datasets.captions.shuffle",
            "variants separator keep",
        ),
        *_keys(
            "datasets.captions.drop_tags",
            "rate variants separator keep",
        ),
        *_keys(
            "datasets.mask",
            "from column suffix unmasked_weight prior_weight normalise",
        ),
        *_keys(
            "datasets.references",
            "column suffix resolution",
        ),
        *_keys(
            "datasets.filters",
            "min_width max_width min_height max_height min_pixels max_pixels min_aspect_ratio "
            "max_aspect_ratio",
        ),
        *_keys(
            "model",
            "revision",
        ),
        *_keys(
            "buckets",
            "resolution resolutions per_image step max_aspect_ratio sizes upscale small_images "
            "crop crop_seed underfilled max_crop_loss",
        ),
        *_keys(
            "latents",
            "dtype compute_dtype posterior flip background",
        ),
        *_keys(
            "text",
            "caption_dropout dtype compute_dtype offload",
        ),
        *_keys(
            "training",
            "steps epochs exhausted batch_size gradient_accumulation learning_rate "
            "optimizer_arguments lr_scheduler lr_cycles lr_power decay_steps ema_decay "
            "warmup_steps guidance max_grad_norm seed quantize compute gradient_checkpointing "
            "offload compile attention_backend checkpoint_every keep_checkpoints sample_every validate_every "
            "tracker_project",
        ),
        *_keys(
            "training.loss",
            "kind delta weighting gamma prior prior_weight",
        ),
        *_keys(
            "training.noise",
            "offset input_perturbation zero_terminal_snr",
        ),
        *_keys(
            "training.timesteps",
            "density location scale mode_scale min max shift",
        ),
        *_keys(
            "training.sample_prompts",
            "prompt negative_prompt height width steps guidance_scale seed lora_scale",
        ),
        *_keys(
            "training.lora",
            "rank alpha kind lokr_factor oft_block_size dropout rank_dropout module_dropout "
            "scale_weight_norms targets conv_rank conv_alpha loraplus_ratio dora rslora init save_dtype "
            "native_file",
        ),
        *_keys(
            "training.lora.ranks",
            "rank alpha",
        ),
        *_keys("training.lora.timestep_ranks", "min_rank power"),
        *_keys(
            "training.lora.learning_rates",
            "learning_rate",
        ),
        *_keys(
            "training.lora.text_encoders",
            "rank alpha targets learning_rate",
        ),
        *_keys(
            "accelerate",
            "num_processes shard mixed_precision cpu_threads",
        ),
        *_keys(
            "diagnosis",
            "captions others",
        ),
        *_keys(
            "evaluation",
            "pictures steps strengths publish",
        ),
        *_keys(
            "evaluation.prompts",
            "prompt negative_prompt height width steps guidance_scale role",
        ),
        *_keys(
            "evaluation.scorers",
            "revision",
        ),
        *_keys(
            "evaluation.limits",
            "drift copies",
        ),
        *_keys(
            "sweep",
            "grid seeds judge max_variants",
        ),
        *_keys(
            "sweep.random",
            "count seed ranges choices",
        ),
        *_keys(
            "sweep.halving",
            "first keep",
        ),
        *_keys(
            "sweep.budget",
            "steps minutes",
        ),
        *_keys(
            "checks",
            "max_rejected_fraction max_image_pixels max_decode_bytes max_file_bytes "
            "near_duplicate_bits allow gates",
        ),
        *_keys(
            "recache",
            "timezone on_change settle_s enabled",
        ),
    ],
}
"""Each key of a recipe that is no section, by what its value can make a job do.

Validators limit expressions in every recipe: `where` to the language of `where_expression.py`, all others to
patterns and times.
"""

_INSIDE = "use a path below a folder of the project such as data/, without links out of it"


def is_untrusted() -> bool:
    """Return True if recipes come from strangers."""
    # Any value other than an empty one and 0 counts, so that a misspelled `true` does not disable the test.
    return os.environ.get(UNTRUSTED_VARIABLE, "").strip() not in ("", "0")


def untrusted_mistakes(data: Mapping[str, Any], root: Path, *, cache_dir: str) -> list[Mistake]:
    """Return the mistakes of a valid recipe that a stranger's recipe must not have.

    `cache_dir` is the default of that key.
    """
    mistakes = [*_code_mistakes(data), *_packed_mistakes(data)]
    for key in (*KEYS["reads a path"], *KEYS["reads a path or the Hub"]):
        for path, value in _values(data, key):
            if (problem := _read_problem(value, root)) is not None:
                what = f"{dotted(path)} must be a path inside the project, got {problem}"
                mistakes.append(_refused(path, what, _INSIDE))

    # The default may be a link in the repository.
    for key in KEYS["reads and writes a path"]:
        for path, value in _values({"cache_dir": cache_dir, **data}, key):
            if (problem := _written_problem(value, root)) is not None:
                folders = " or ".join(f"{folder}/" for folder in WRITABLE)
                what = f"{dotted(path)} must be a folder below {folders}, got {problem}"
                mistakes.append(
                    _refused(path, what, f"use {WRITABLE[0]}/ and a name, without links out of it")
                )
    return mistakes


def link_mistake(file: Path, folder: Path) -> Mistake | None:
    """Return a mistake if a recipe is a link out of `folder`."""
    # Messages could show the text of its target.
    real = Path(os.path.realpath(file))
    if real.is_relative_to(os.path.realpath(folder)):
        return None
    return _refused((), "the recipe must be a file in its folder, got a link out of it", "copy the file")


def _code_mistakes(data: Mapping[str, Any]) -> Iterator[Mistake]:
    # Importing a module runs its code. `model.allow_pickle` is ignored where files are opened.
    for path, optimizer in _values(data, "training.optimizer"):
        if optimizer not in OPTIMIZERS:
            what = f"training.optimizer must be {one_of(OPTIMIZERS)}, got the import path {optimizer}"
            yield _refused(path, what, f"use {one_of(OPTIMIZERS)}")

    for path, scorer in _values(data, "evaluation.scorers"):
        # A scorer is a name, or a section with the key `name`.
        if (isinstance(path[-1], int) or path[-1] == "name") and scorer not in SCORERS:
            what = f"{dotted(path)} must be {one_of(SCORERS)}, got the import path {scorer}"
            yield _refused(path, what, f"use {one_of(SCORERS)}")

    # A link can lead to any file of the user, whose text would be published as a caption.
    for path, follow_links in _values(data, "datasets.follow_links"):
        if follow_links:
            yield _refused(path, f"{dotted(path)} must be false, got true", "remove this key")
    for section, key in _swept_keys(data):
        if key not in KEYS["none"]:
            what = f"{section} must not vary {key}, which can run code or read a path"
            yield _refused(tuple(section.split(".")), what, f"remove {key}")
    for path, tracker in _values(data, "training.trackers"):
        if tracker != "tensorboard":
            what = f"{dotted(path)} must be tensorboard, got {tracker}, which sends data to a server"
            yield _refused(path, what, f"remove {tracker}")

    # A part of a file name or an address could lead out of the run's folder.
    for path, _ in _values(data, "training.tracker_arguments"):
        yield _refused(path, f"{dotted(path)} must not be set", "remove training.tracker_arguments")


def _packed_mistakes(data: Mapping[str, Any]) -> Iterator[Mistake]:
    # Their images are unpacked to the scratch folder, which is not one of the writable folders.
    for path, _ in _values(data, "datasets.image_column"):
        yield _refused(path, f"{dotted(path)} must not be set", "write the images to a folder")
    for path, value in _values(data, "datasets.path"):
        if Path(value).suffix.lower() == TAR:
            what = f"{dotted(path)} must be a folder or a manifest, got {value}"
            yield _refused(path, what, "unpack the archive to a folder")


def _swept_keys(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the section of the sweep and each key that varies, without names of datasets."""
    for section in ("sweep.grid", "sweep.random.ranges", "sweep.random.choices"):
        holder: Any = data
        for name in section.split("."):
            holder = child(holder, name)
        for key in cast("dict[str, Any]", holder or {}):
            yield section, plain_key(key)


def _values(data: Any, key: str) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the path and value of a dotted key, and of each item of its lists and mappings."""
    yield from _below(data, tuple(key.split(".")), ())


def _below(value: Any, names: tuple[str, ...], path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, list):
        for index, item in enumerate(cast("list[Any]", value)):
            yield from _below(item, names, (*path, index))
    elif isinstance(value, dict):
        mapping = cast("dict[str, Any]", value)
        for name in names[:1] or mapping:
            yield from _below(mapping.get(name), names[1:], (*path, name))
    elif value is not None and not names:
        yield path, value


def _read_problem(text: str, root: Path) -> str | None:
    if is_url(text):
        return "an address"

    # The real path, because a repository can hold a link that leads out of it.
    real = _real(root, text)
    if not _is_readable(real, root):
        return text

    # A manifest's images are in its folder, unless the recipe names another one.
    folder = real.parent if real.suffix.lower() in MANIFEST_SUFFIXES else real
    if not _is_readable(folder, root):
        return f"{text}, a manifest next to the project's code"
    links = (link for link in _links_below(folder) if not _is_readable(_real(root, link), root))
    return next((f"{text} with the link {os.path.relpath(link, folder)} out of it" for link in links), None)


def _is_readable(real: Path, root: Path) -> bool:
    """Return whether a real path is in the project, but is neither all of it nor hidden, such as .git."""
    real_root = Path(os.path.realpath(root))
    if not real.is_relative_to(real_root):
        return False
    parts = real.relative_to(real_root).parts
    return len(parts) > 0 and not any(part.startswith(".") for part in parts)


def _written_problem(text: str, root: Path) -> str | None:
    if is_url(text):
        return "an address"
    real = _real(root, text)
    outputs, cache = (Path(os.path.realpath(root), folder) for folder in WRITABLE)
    if not ({outputs, cache} & set(real.parents) or real == cache):
        return text

    # A table written through a link would replace a file of another folder.
    links = (link for link in _links_below(real) if not _real(root, link).is_relative_to(real))
    return next((f"{text} with the link {os.path.relpath(link, real)} out of it" for link in links), None)


def _real(root: Path, text: str) -> Path:
    return Path(os.path.realpath(root / expanded(text)))


def _links_below(folder: Path) -> Iterator[str]:
    """Yield the links at any depth of a folder; none are followed."""
    pending = [str(folder)]
    while pending:
        with suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    yield entry.path
                elif entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)


def _refused(path: KeyPath, what: str, fix: str) -> Mistake:
    return Mistake(path, f"{what}, because {UNTRUSTED_VARIABLE} is set", fix)
