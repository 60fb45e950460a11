"""`latentline provenance`: what a LoRA file says it was made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from pipeline.trained_lora.export.lora_files import lora_file, read_provenance
from pipeline.trained_lora.provenance import caption_hashes_of, find_in_provenance

_PATH = click.Path(exists=True, path_type=Path)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command
@click.argument("file", type=_PATH)
@click.option("--find", "wanted", type=_FILE, help="An image, or a text file that holds a caption.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole record as JSON.")
def command(file: Path, wanted: Path | None, as_json: bool) -> None:
    """Print what the LoRA in FILE was made of: a .safetensors file, lora/, or a recipe's output folder.

    With --find: whether that image or caption was among what it was trained on; exit status 1 if not.
    """
    record = read_provenance(file)
    if wanted is not None:
        _find(record, lora_file(file), wanted)
    elif as_json:
        click.echo(json.dumps(record, indent=2, ensure_ascii=False))
    else:
        for name, value in _summary(record).items():
            click.echo(f"{name:20} {value}")


def _find(record: dict[str, Any], file: Path, wanted: Path) -> None:
    found = find_in_provenance(record, file, wanted)
    for line in found:
        click.echo(line)
    if not found:
        tried = "" if not caption_hashes_of(wanted) else ", as an image or as a caption"
        click.echo(f"{wanted} is not among what it was trained on{tried}")
        raise SystemExit(1)


def _given(record: dict[str, Any]) -> dict[str, object]:
    given = record.get("overrides") or {}
    if not given:
        return {}
    return {"not the recipe's": ", ".join(f"{name} {value}" for name, value in given.items())}


def _summary(record: dict[str, Any]) -> dict[str, object]:
    recipe, model, samples = record["recipe"], record["model"], record["samples"]
    training = recipe["training"]
    summary: dict[str, object] = {
        "recipe": recipe["name"],
        "base model": model["base"] + (f" at {model['revision']}" if model["revision"] else ""),
        "family": record["facts"]["model"]["family"],
        "steps asked for": training["steps"],
        "seed": training["seed"],
        **_given(record),
        "images": f"{samples['number']}, sha256 of them all {samples['sha256']}",
        "datasets": ", ".join(dataset["name"] for dataset in recipe["datasets"]),
    }
    summary |= {f"sha256 of {use}": value for use, value in model["fingerprints"].items()}
    summary |= {f"table {name}": value or "was not there" for name, value in record["tables_sha256"].items()}
    summary["packages"] = ", ".join(f"{name} {value}" for name, value in record["packages"].items() if value)
    return summary
