"""Provenance: the record of data, model and settings in each LoRA file, and looking a sample up in it.

It contains nothing volatile and no absolute path.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.errors import RUN_RECIPE, TrainingError, counted
from pipeline.models.families import Use
from pipeline.models.families.family import FORCES_ZEROS, LOSES_ZERO_SNR, MODULAR
from pipeline.recipe import shareable_path
from pipeline.storage.regular_files import RefusedFileError, file_sha256, open_regular, read_all
from pipeline.storage.tables import ASSETS, Tables, read_rows
from pipeline.trained_lora.caption_sources import caption_sources
from pipeline.trained_lora.export.lora_files import SAMPLES_FILE

if TYPE_CHECKING:
    from pipeline.cache.recipe_entries import RecipeEntries
    from pipeline.recipe import Recipe
    from pipeline.trained_lora.recipe_facts import Facts

PACKAGES = ("latentline", "accelerate", "diffusers", "numpy", "peft", "safetensors", "torch", "transformers")

MAX_LISTED = 5_000
"""Largest number of samples with hashes that are listed in the record. Larger runs store only a digest."""

MAX_CAPTION_BYTES = 1_000_000
"""Largest size of a file that is looked up as a caption."""

_USES: tuple[Use, ...] = ("latents", "text", "denoiser")


def provenance(recipe: Recipe, entries: RecipeEntries, facts: Facts, table: pl.DataFrame) -> dict[str, Any]:
    """Return the JSON-serializable record of a run, which is complete before the first step."""
    tables = Tables(recipe.output_dir)
    paths = {asset: tables.path(asset) for asset in ASSETS if asset != "trained_lora"}
    table_digests = {asset: file_sha256(path) if path.is_file() else None for asset, path in paths.items()}
    captions = caption_sources(recipe, table)

    return {
        "recipe": shareable(recipe),
        "facts": facts,
        "samples": _samples_record(table),
        **({"captions": captions} if captions else {}),
        "tables_sha256": table_digests,
        "model": {
            "base": shareable_path(recipe.model.base),
            "revision": recipe.model.revision,
            "components": {
                role: shareable_path(path) for role, path in recipe.model.components.given().items()
            },
            "fingerprints": {use: entries.fingerprint(use) for use in _USES},
            **_training_adapter(recipe, facts),
            **_context_lora(recipe, facts),
            # For the model card, which may be written where the base model is not available.
            **({FORCES_ZEROS: True} if entries.family.forces_zeros else {}),
            **({LOSES_ZERO_SNR: True} if entries.family.loses_zero_snr else {}),
            **({MODULAR: True} if entries.family.is_modular else {}),
        },
        "packages": {name: _package_version(name) for name in PACKAGES},
        "python": platform.python_version(),
    }


def shareable(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as JSON, without absolute paths, passwords and query strings of addresses."""
    # Arguments of trackers change no weight and may name servers of a private network.
    hidden = {"output_address": True, "owners": True, "training": {"tracker_arguments", "tracker_project"}}
    values = recipe.model_dump(mode="json", exclude=hidden)
    values["output_dir"] = str(recipe.registered_output)
    # Every text, because a list of the keys that hold paths misses the next key (FAILURES H05).
    return _with_shareable_paths(values)


def _with_shareable_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_shareable_paths(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_shareable_paths(each) for each in value]
    return shareable_path(value) if isinstance(value, str) else value


def _training_adapter(recipe: Recipe, facts: Facts) -> dict[str, Any]:
    name = recipe.model.training_adapter
    if name is None:
        return {}
    digest = facts["model"]["training_adapter"]
    return {"training_adapter": {"name": shareable_path(name), "sha256": digest}}


def _context_lora(recipe: Recipe, facts: Facts) -> dict[str, Any]:
    context = recipe.model.context_lora
    if context is None:
        return {}
    name = shareable_path(str(context.path))
    return {"context_lora": {"name": name, **facts["model"]["context_lora"]}}


def _samples_record(table: pl.DataFrame) -> dict[str, Any]:
    trained = table.filter(pl.col("split") == "train")
    rows = trained.select("content_hash", "caption_hashes").rows()
    # In the order of the hashes, so that renaming files does not change the digest (FAILURES R17).
    lines = sorted(f"{image} {captions}" for image, captions in rows)
    references: list[str] = []
    if "reference_hashes" in trained.columns:
        references = trained["reference_hashes"].drop_nulls().to_list()
        with_references = trained.select("content_hash", "caption_hashes", "reference_hashes").rows()
        lines = sorted(" ".join(each or "" for each in row).strip() for row in with_references)
    record: dict[str, Any] = {
        "number": len(rows),
        "sha256": hashlib.sha256("\n".join(lines).encode("ascii")).hexdigest(),
    }
    if len(rows) <= MAX_LISTED:
        record["images"] = sorted({image for image, _ in rows})
        record["captions"] = sorted({each for _, captions in rows for each in captions.split()})
        if references:
            record["references"] = sorted({each for hashes in references for each in hashes.split()})
    return record


def _package_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def caption_hash(caption: str) -> str:
    """Return the SHA-256 of a caption's UTF-8 bytes in hexadecimal."""
    return hashlib.sha256(caption.encode("utf-8")).hexdigest()


def caption_hashes_of(path: Path) -> list[str]:
    """Return the hashes that the caption in a text file may have; empty if the file is not text."""
    try:
        with open_regular(path, max_bytes=MAX_CAPTION_BYTES) as file:
            # A caption file may begin with a byte order mark (FAILURES C02).
            text = read_all(file).decode("utf-8-sig")
    except (RefusedFileError, UnicodeDecodeError):
        return []

    # Training hashes a caption in its canonical form, which may differ from the file in white space.
    return sorted({caption_hash(text), caption_hash(text.strip()), caption_hash(" ".join(text.split()))})


def find_in_provenance(record: Mapping[str, Any], lora: Path, wanted: Path) -> list[str]:
    """Look up whether a LoRA, a file or its folder, was trained on an image or a text file with a caption.

    Returns:
        One line if the record lists `wanted`, and one per matching row of the table of samples in the folder.

    Raises:
        TrainingError: The record holds only a digest and the table is missing, the table is damaged, or
            `wanted` is not a regular file.
    """
    image, captions = _hashes_of(wanted)
    samples = record["samples"]
    table = (lora if lora.is_dir() else lora.parent) / SAMPLES_FILE

    # The record of a run with more than `MAX_LISTED` samples has only a digest.
    if "images" not in samples and not table.is_file():
        raise TrainingError(
            f"the LoRA file holds only a digest of its {counted(samples['number'], 'sample')}",
            where=str(lora),
            fix=f"copy {SAMPLES_FILE} from the run that made the LoRA into the same folder",
        )

    matches = _listed(samples, wanted, image, captions)
    # A LoRA has also learned what the runs that its run continues were trained on.
    earlier = record.get("continues")
    while earlier is not None:
        lines = _listed(earlier["samples"], wanted, image, captions)
        matches += [f"{line}, in run {earlier['run']}, which this run continues" for line in lines]
        earlier = earlier.get("continues")
    return matches + _matching_rows(table, image, captions)


def _listed(samples: Mapping[str, Any], wanted: Path, image: str, captions: Sequence[str]) -> list[str]:
    matches: list[str] = []
    if image in samples.get("images", ()):
        matches.append(f"{wanted} is one of the training images")
    if image in samples.get("references", ()):
        matches.append(f"{wanted} is one of the reference images")
    if set(captions) & set(samples.get("captions", ())):
        matches.append(f"{wanted} is one of the training captions")
    return matches


def _hashes_of(wanted: Path) -> tuple[str, list[str]]:
    """Return the hash of a file as an image, and its hashes as a caption."""
    try:
        with open_regular(wanted) as file:
            return hashlib.file_digest(file, "sha256").hexdigest(), caption_hashes_of(wanted)
    except OSError as err:
        fix = "pass an image, or a text file with a caption, to --find"
        raise TrainingError(f"the file cannot be read: {err}", where=str(wanted), fix=fix) from err


def _matching_rows(path: Path, image: str, captions: list[str]) -> list[str]:
    if not path.is_file():
        return []
    columns = ["sample_id", "content_hash", "caption_hashes", "times_seen", "split", "reference_hashes"]
    try:
        table = read_rows(path, columns)
    except (OSError, pl.exceptions.PolarsError) as err:
        fix = f"start the job that made the LoRA again, which writes the table: {RUN_RECIPE} <recipe>"
        raise TrainingError(f"the table of samples is damaged: {err}", where=str(path), fix=fix) from err

    is_reference = pl.lit(False)
    if "reference_hashes" in table.columns:
        is_reference = pl.col("reference_hashes").str.contains(image, literal=True).fill_null(False)
    has_caption = pl.col("caption_hashes").str.split(" ").list.eval(pl.element().is_in(captions)).list.any()
    rows = table.filter(
        pl.col("split") == "train", (pl.col("content_hash") == image) | has_caption | is_reference
    )
    return [
        f"sample {row['sample_id']}, seen {counted(row['times_seen'], 'time')}"
        for row in rows.iter_rows(named=True)
    ]
