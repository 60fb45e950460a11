"""`latentline provenance`: print the provenance of a LoRA."""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from pipeline.cli.conventions import echo, log_to_stderr, report_broken_recipes
from pipeline.cli.json_output import give, json_option
from pipeline.errors import TrainingError
from pipeline.outputs.folder import OutputFolder
from pipeline.recipe import load_recipe_folder, recipes_dir
from pipeline.storage.addresses import Url, is_url
from pipeline.trained_lora.export.lora_files import (
    LORA_FOLDER,
    damaged_record_error,
    lora_file,
    read_provenance,
)
from pipeline.trained_lora.export.model_card import training_rows
from pipeline.trained_lora.fingerprint import run_id
from pipeline.trained_lora.provenance import caption_hashes_of, find_in_provenance

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(short_help="Show what a LoRA was trained on.")
@click.argument("file")
@click.option(
    "--find",
    "wanted",
    type=_FILE,
    help="Show whether the LoRA was trained on this image, or on the caption in this text file. If not, the "
    "exit status is 1.",
)
@json_option("Print the complete record as JSON.")
def command(file: str, wanted: Path | None, as_json: bool) -> None:
    """Show the settings, base model and data that a LoRA was trained with.

    FILE is the name of a recipe, a .safetensors file that Latentline exported, the folder that contains it
    (lora/), or the output folder of a recipe, such as outputs/flowers, which may be at an address.
    """
    report_broken_recipes()
    with _downloaded(_place_of(file)) as path:
        _show(path, wanted, as_json=as_json)


@contextmanager
def _downloaded(file: str) -> Generator[Path]:
    if not is_url(file):
        yield Path(file)
        return
    with tempfile.TemporaryDirectory(prefix="latentline-") as folder:
        outputs = OutputFolder(Url(file), Path(folder), log=log_to_stderr)
        if not outputs.fetch(f"{LORA_FOLDER}/"):
            fix = "pass the output_dir of a recipe that has been trained, such as s3://bucket/flowers"
            raise TrainingError("the output folder contains no LoRA", where=outputs.where(), fix=fix)
        yield Path(folder)


def _show(file: Path, wanted: Path | None, *, as_json: bool) -> None:
    record = read_provenance(file)
    try:
        if wanted is not None:
            _find(record, lora_file(file), wanted)
        elif as_json:
            give(record)
        else:
            for name, value in _summary(record).items():
                echo(f"{name:20} {value}")
    # Anybody can write such a file, so the record may lack keys or hold values of other types.
    except (AttributeError, KeyError, TypeError, ValueError) as err:
        raise damaged_record_error(lora_file(file), err) from err


def _place_of(file: str) -> str:
    """Return a path or an address: `file` itself, or the output folder of the recipe with this name."""
    if is_url(file) or Path(file).exists():
        return file
    recipes = load_recipe_folder().recipes if recipes_dir().is_dir() else []
    recipe = next((each for each in recipes if each.name == file), None)
    if recipe is None:
        fix = "pass the name of a recipe, a .safetensors file, lora/, or the output folder of a recipe"
        raise TrainingError(f"{file} does not exist", where=str(Path(file).absolute()), fix=fix)
    return str(recipe.output_address)


def _find(record: dict[str, Any], file: Path, wanted: Path) -> None:
    matches = find_in_provenance(record, file, wanted)
    give({"found": bool(matches), "matches": matches})
    for line in matches:
        echo(line)
    if not matches:
        as_what = "an image or caption" if caption_hashes_of(wanted) else "an image"
        echo(f"the LoRA was not trained on {wanted} as {as_what}")
        raise SystemExit(1)


def _summary(record: dict[str, Any]) -> dict[str, object]:
    recipe, model, samples = record["recipe"], record["model"], record["samples"]
    revision = f" at {model['revision']}" if model["revision"] else ""
    summary: dict[str, object] = {"recipe": recipe["name"], "run": run_id(record["facts"])}
    summary |= training_rows(record, record.get("steps") or recipe["training"]["steps"])
    summary |= {
        "base model": f"{model['base']}{revision}",
        "family": record["facts"]["model"]["family"],
    }
    if "step" in record:
        summary["exported step"] = record["step"]
    if overrides := record.get("overrides"):
        summary["overrides"] = ", ".join(f"{name} {value}" for name, value in overrides.items())
    summary["images"] = f"{samples['number']}, combined sha256 {samples['sha256']}"
    summary["datasets"] = ", ".join(dataset["name"] for dataset in recipe["datasets"])
    summary |= {f"sha256 of {use}": value for use, value in model["fingerprints"].items()}
    summary |= {f"table {name}": value or "missing" for name, value in record["tables_sha256"].items()}
    summary["packages"] = ", ".join(f"{name} {value}" for name, value in record["packages"].items() if value)
    return summary
