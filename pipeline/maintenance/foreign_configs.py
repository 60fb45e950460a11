"""Find the datasets in configuration files of other trainers."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import DatasetError
from pipeline.recipe.other_trainers import terms_by_trainer
from pipeline.recipe.yaml_document import parse

FORMS = (
    "sd-scripts' dataset TOML, OneTrainer's concepts JSON, ai-toolkit's YAML, SimpleTuner's multidatabackend "
    "JSON or diffusion-pipe's dataset TOML"
)


class Entry(NamedTuple):
    """A dataset in another trainer's file: its settings by dotted name, or the reason to skip it."""

    settings: dict[str, Any]
    skip: str = ""


@dataclass(frozen=True)
class Config:
    """Content of a configuration file.

    Attributes:
        trainer: Name of the trainer, as in recipe/other_trainers.toml.
        entries: Its datasets.
        others: Settings outside the datasets that have an equivalent in a recipe, by dotted name.
    """

    trainer: str
    entries: list[Entry]
    others: Mapping[str, Any] = field(default_factory=dict[str, Any])


def read_config(file: Path) -> Config:
    """Return the content of a JSON, YAML or TOML file of a trainer that is recognised by the content.

    Raises:
        DatasetError: The file cannot be read, or has an unknown form.
    """
    data = _parsed(file)
    for recognise in (_sd_scripts, _onetrainer, _ai_toolkit, _simpletuner, _diffusion_pipe):
        try:
            config = recognise(data, file)
        except (AttributeError, KeyError, TypeError, ValueError):
            continue  # a key or type of that trainer's form is missing
        if config is not None and config.entries:
            return config
    raise DatasetError(
        "the configuration file has an unknown form",
        where=str(file.absolute()),
        fix=f"pass a folder of images, or {FORMS}",
    )


def candidate_paths(name: str, file: Path) -> list[Path]:
    """Return the paths that a name in `file` may mean: trainers resolve them in their own folder."""
    folders = (file.absolute().parent, file.absolute().parent.parent, Path.cwd())
    return [folder / Path(name).expanduser() for folder in folders]


def _parsed(file: Path) -> Any:
    """Return the content of a JSON, YAML or TOML file as plain data.

    Raises:
        DatasetError: The file cannot be read or parsed.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix.lower() == ".json":
            return json.loads(text)
        if file.suffix.lower() == ".toml":
            return tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as err:
        reason = err.strerror if isinstance(err, OSError) else str(err)
        what = f"the configuration file cannot be read: {reason}"
        raise DatasetError(
            what, where=str(file.absolute()), fix="correct the file, or pass a folder"
        ) from err

    document = parse(text)
    if document.flaws:
        flaw = document.flaws[0]
        where = f"{file.absolute()}:{flaw.line}"
        raise DatasetError(
            f"the configuration file is not valid YAML: {flaw.what}", where=where, fix=flaw.fix
        )
    return document.data


def _sd_scripts(data: Any, _file: Path) -> Config | None:
    """Settings of a subset override those of its dataset, which override the general ones."""
    datasets = data["datasets"]
    entries = [
        Entry(
            {
                **data.get("general", {}),
                **{key: dataset[key] for key in dataset if key != "subsets"},
                **subset,
            }
        )
        for dataset in datasets
        for subset in dataset["subsets"]
    ]
    return Config("sd-scripts", entries)


def _onetrainer(data: Any, file: Path) -> Config | None:
    """A list of concepts, or a configuration that contains them or names their file."""
    others: dict[str, Any] = {}
    if isinstance(data, dict):
        if "concepts" not in data and "concept_file_name" not in data:
            return None
        concepts = data.get("concepts") or _linked(data["concept_file_name"], file)
        terms = {each.theirs for each in terms_by_trainer()["OneTrainer"]} - {"concepts"}
        others = {key: value for key, value in data.items() if key in terms}
        data = concepts
    if not any("path" in concept and ("text" in concept or "image" in concept) for concept in data):
        return None
    return Config("OneTrainer", [_onetrainer_entry(concept, file) for concept in data], others)


def _onetrainer_entry(concept: Mapping[str, Any], file: Path) -> Entry:
    settings = dict(_flat(concept))
    if settings.get("enabled") is False:
        return Entry(settings, "it is disabled")
    if settings.get("type", "STANDARD") == "VALIDATION":
        return Entry(settings, "it is for validation; datasets[].validation_fraction holds out images")
    if settings.get("type", "STANDARD") != "STANDARD":
        return Entry(settings, f"its type {settings['type']} is not supported")
    if settings.get("balancing_strategy") == "SAMPLES":
        settings.pop("balancing", None)

    # The prompts of a concept are the lines of one file, from which every image gets a random one.
    prompts = _lines(str(settings.pop("text.prompt_path", "")), file)
    if settings.get("text.prompt_source") == "concept" and prompts:
        settings |= {"prompt": prompts[0], "other_prompts": prompts[1:]}
    return Entry(settings)


def _ai_toolkit(data: Any, _file: Path) -> Config | None:
    """Datasets of all processes; a process's trigger word applies to its datasets."""
    entries: list[Entry] = []
    others: dict[str, Any] = {}
    for process in data["config"]["process"]:
        shared = {"trigger_word": process.get("trigger_word")}
        entries += [Entry(dict(_flat({**shared, **dataset}))) for dataset in process["datasets"]]
        rest = {key: process[key] for key in process if key not in ("datasets", "trigger_word", "type")}
        terms = {each.theirs for each in terms_by_trainer()["ai-toolkit"]}
        others |= {key: value for key, value in _flat(rest) if key.rpartition(".")[2] in terms}
    return Config("ai-toolkit", entries, others)


def _simpletuner(data: Any, file: Path) -> Config | None:
    """A list of data backends, or a config.json that names their file."""
    others: dict[str, Any] = {}
    if isinstance(data, dict):
        plain = {str(key).lstrip("-"): value for key, value in data.items()}
        if "data_backend_config" not in plain:
            return None
        terms = {each.theirs for each in terms_by_trainer()["SimpleTuner"]}
        others = {key: value for key, value in plain.items() if key in terms}
        data = _linked(plain["data_backend_config"], file)
    if not any("instance_data_dir" in backend for backend in data):
        return None
    return Config("SimpleTuner", [_simpletuner_entry(backend) for backend in data], others)


def _simpletuner_entry(backend: Mapping[str, Any]) -> Entry:
    settings = dict(_flat(backend))
    kind, storage = settings.get("dataset_type", "image"), settings.get("type", "local")
    if settings.get("disabled") or settings.get("disable"):
        return Entry(settings, "it is disabled")
    if kind in ("text_embeds", "image_embeds"):
        return Entry(settings, "not needed: cache_dir holds the cache")
    if kind != "image":
        return Entry(settings, f"its dataset_type {kind} is not supported")
    if storage != "local":
        return Entry(settings, f"its type {storage} is not read; set datasets[].path to an fsspec address")

    # An area is in megapixels, where 1.0 is 1024 x 1024 pixels.
    resolution = settings.get("resolution")
    if settings.get("resolution_type") == "area" and isinstance(resolution, int | float):
        settings["resolution"] = round(math.sqrt(resolution) * 1024)
    return Entry(settings)


def _diffusion_pipe(data: Any, _file: Path) -> Config | None:
    shared = {key: value for key, value in data.items() if key != "directory"}
    return Config("diffusion-pipe", [Entry({**shared, **each}) for each in data["directory"]])


def _linked(name: Any, file: Path) -> Any:
    """Return the content of a file that a configuration names."""
    linked = next((path for path in candidate_paths(str(name), file) if path.is_file()), None)
    if linked is None:
        fix = "pass that file instead"
        raise DatasetError(f"the file {name} does not exist", where=str(file.absolute()), fix=fix)
    return _parsed(linked)


def _lines(name: str, file: Path) -> list[str]:
    path = next((path for path in candidate_paths(name, file) if path.is_file()), None)
    if path is None:
        return []
    return [line.strip() for line in path.read_text("utf-8", "replace").splitlines() if line.strip()]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting with its dotted name."""
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
