"""Find the datasets in configuration files of other trainers."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pipeline.errors import DatasetError
from pipeline.recipe.other_trainers import terms_by_trainer
from pipeline.recipe.yaml_document import parse
from pipeline.storage.addresses import expanded

FORMS = (
    "sd-scripts' dataset TOML, OneTrainer's concepts JSON, ai-toolkit's YAML, SimpleTuner's multidatabackend "
    "JSON or diffusion-pipe's dataset TOML"
)


class FolderRules(NamedTuple):
    """How a trainer reads a folder of images.

    Attributes:
        exclude: Patterns of images that it does not train on.
        lines: Which lines of a caption file it uses: all as one caption, the first, or each as a caption.
        keep_tags: Number of tags at the start of a caption that it does not shuffle, by default.
    """

    subfolders: bool = True
    exclude: tuple[str, ...] = ()
    lines: Literal["one", "first", "each"] = "one"
    keep_tags: int = 0


FOLDER_RULES = {
    "sd-scripts": FolderRules(subfolders=False, lines="first"),
    "OneTrainer": FolderRules(
        subfolders=False, exclude=("*-masklabel.png", "*-condlabel.png"), lines="each", keep_tags=1
    ),
    "ai-toolkit": FolderRules(exclude=("_controls",)),
    "SimpleTuner": FolderRules(lines="each"),
    "diffusion-pipe": FolderRules(subfolders=False),
}
"""How each trainer reads folders by default."""


class ForeignDataset(NamedTuple):
    """A dataset in another trainer's file.

    Attributes:
        settings: Its settings by dotted name.
        skip: Reason to skip it; empty if it is used.
        remarks: Texts about settings that are not taken over.
    """

    settings: dict[str, Any]
    folder_rules: FolderRules
    skip: str = ""
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class ForeignConfig:
    """Content of a configuration file.

    Attributes:
        trainer: Name of the trainer, as in recipe/other_trainers.toml.
        others: Settings outside the datasets that have another name in a recipe, by dotted name.
        has_training: Whether the file also configures the model and the training.
    """

    trainer: str
    entries: list[ForeignDataset]
    others: Mapping[str, Any] = field(default_factory=dict[str, Any])
    has_training: bool = False


def read_config(file: Path) -> ForeignConfig:
    """Return the content of a JSON, YAML or TOML file of a trainer that is recognised by the content."""
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
    return [folder / expanded(name) for folder in folders]


def _parsed(file: Path) -> Any:
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


def _sd_scripts(data: Any, _file: Path) -> ForeignConfig | None:
    # Settings of a subset override settings of its dataset, which override the general ones.
    datasets = data["datasets"]
    entries = [
        _sd_scripts_entry(
            {
                **data.get("general", {}),
                **{key: dataset[key] for key in dataset if key != "subsets"},
                **subset,
            }
        )
        for dataset in datasets
        for subset in dataset["subsets"]
    ]
    return ForeignConfig("sd-scripts", entries)


def _sd_scripts_entry(settings: dict[str, Any]) -> ForeignDataset:
    remarks: list[str] = []
    if settings.get("shuffle_caption"):
        remarks = [
            f"{name} {settings[name]}: it keeps its place, while sd-scripts shuffles it with the tags"
            for name in ("caption_prefix", "caption_suffix")
            if settings.get(name)
        ]
    return ForeignDataset(settings, FOLDER_RULES["sd-scripts"], remarks=tuple(remarks))


def _onetrainer(data: Any, file: Path) -> ForeignConfig | None:
    # Either a list of concepts, or a configuration that contains them or names their file.
    others: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    has_training = isinstance(data, dict)
    if isinstance(data, dict):
        if "concepts" not in data and "concept_file_name" not in data:
            return None
        concepts = data.get("concepts") or _linked(data["concept_file_name"], file)
        terms = {each.theirs for each in terms_by_trainer()["OneTrainer"]} - {"concepts"}
        others = {key: value for key, value in data.items() if key in terms}
        shared = {"resolution": data["resolution"]} if data.get("resolution") else {}
        data = concepts
    if not any("path" in concept and ("text" in concept or "image" in concept) for concept in data):
        return None
    entries = [_onetrainer_entry({**shared, **concept}, file) for concept in data]
    return ForeignConfig("OneTrainer", entries, others, has_training)


def _onetrainer_entry(concept: Mapping[str, Any], file: Path) -> ForeignDataset:
    settings = dict(_flat(concept))
    folder_rules = FOLDER_RULES["OneTrainer"]._replace(
        subfolders=bool(settings.get("include_subdirectories"))
    )
    if settings.get("enabled") is False:
        return ForeignDataset(settings, folder_rules, "it is disabled")
    kind = "VALIDATION" if settings.get("validation_concept") else settings.get("type", "STANDARD")
    if kind == "VALIDATION":
        return ForeignDataset(
            settings, folder_rules, "it is for validation; datasets[].validation_fraction holds out images"
        )
    if kind != "STANDARD":
        return ForeignDataset(settings, folder_rules, f"its type {kind} is not supported")
    if settings.get("balancing_strategy") == "SAMPLES":
        settings.pop("balancing", None)
    if settings.get("image.enable_resolution_override"):
        settings["resolution"] = settings.get("image.resolution_override")

    # The prompts of a concept are the lines of one file, from which every image gets a random one.
    remarks: list[str] = []
    name, source = str(settings.pop("text.prompt_path", "")), settings.get("text.prompt_source")
    if source == "concept":
        prompts = _lines(name, file)
        if prompts:
            settings["text.prompt_path"] = prompts[0]
        if len(prompts) != 1:
            why = f"it has {len(prompts):,} prompts, and a recipe has one text for all images of a dataset"
            remarks.append(f"text.prompt_path {name}: {why if prompts else 'the file lacks prompts'}")
    elif source == "filename":
        remarks.append("text.prompt_source filename: an underscore in a file name becomes a space")
    return ForeignDataset(settings, folder_rules, remarks=tuple(remarks))


def _ai_toolkit(data: Any, _file: Path) -> ForeignConfig | None:
    # A process's trigger word applies to its datasets.
    entries: list[ForeignDataset] = []
    others: dict[str, Any] = {}
    for process in data["config"]["process"]:
        shared = {"trigger_word": process.get("trigger_word")}
        entries += [_ai_toolkit_entry({**shared, **dataset}) for dataset in process["datasets"]]
        rest = {key: process[key] for key in process if key not in ("datasets", "trigger_word", "type")}
        terms = {each.theirs for each in terms_by_trainer()["ai-toolkit"]}
        others |= {key: value for key, value in _flat(rest) if key.rpartition(".")[2] in terms}
    return ForeignConfig("ai-toolkit", entries, others, has_training=True)


def _ai_toolkit_entry(dataset: Mapping[str, Any]) -> ForeignDataset:
    settings = dict(_flat(dataset))
    folder_rules, trigger = FOLDER_RULES["ai-toolkit"], settings.get("trigger_word")
    if trigger and settings.get("is_reg"):
        # Captions of regularisation images get the trigger word only where they name it.
        del settings["trigger_word"]
    elif trigger:
        settings["placeholder"] = "[trigger]"
    return ForeignDataset(settings, folder_rules)


def _simpletuner(data: Any, file: Path) -> ForeignConfig | None:
    # Either a list of data backends, or a config.json that names their file.
    others: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    has_training = isinstance(data, dict)
    if isinstance(data, dict):
        plain = {str(key).lstrip("-"): value for key, value in data.items()}
        if "data_backend_config" not in plain:
            return None

        terms = {each.theirs for each in terms_by_trainer()["SimpleTuner"]}
        defaults = (
            "resolution",
            "resolution_type",
            "caption_strategy",
            "instance_prompt",
            "minimum_image_size",
        )
        shared = {key: plain[key] for key in defaults if plain.get(key)}
        others = {key: value for key, value in plain.items() if key in terms and key not in shared}
        data = _linked(plain["data_backend_config"], file)

    if not any("instance_data_dir" in backend for backend in data):
        return None
    entries = [_simpletuner_entry(backend, shared) for backend in data]
    return ForeignConfig("SimpleTuner", entries, others, has_training)


def _simpletuner_entry(backend: Mapping[str, Any], shared: Mapping[str, Any]) -> ForeignDataset:
    settings = dict(_flat({**shared, **backend}))
    folder_rules = FOLDER_RULES["SimpleTuner"]
    kind, storage = settings.get("dataset_type", "image"), settings.get("type", "local")
    if settings.get("disabled") or settings.get("disable"):
        return ForeignDataset(settings, folder_rules, "it is disabled")
    if kind in ("text_embeds", "image_embeds"):
        return ForeignDataset(settings, folder_rules, "not needed: cache_dir holds the cache")
    if kind != "image":
        return ForeignDataset(settings, folder_rules, f"its dataset_type {kind} is not supported")
    if storage != "local":
        skip = f"its type {storage} is not read; set datasets[].path to an fsspec address"
        return ForeignDataset(settings, folder_rules, skip)

    # An area is in megapixels, where 1.0 is 1024 x 1024 pixels.
    resolution = settings.get("resolution")
    if settings.get("resolution_type") == "area" and isinstance(resolution, int | float):
        settings |= {"resolution": round(math.sqrt(resolution) * 1024), "resolution_type": "pixel_area"}
    if not settings.get("crop"):
        settings = {key: value for key, value in settings.items() if not key.startswith("crop_")}
    if settings.pop("disable_multiline_split", False):
        folder_rules = folder_rules._replace(lines="one")
    return ForeignDataset(_simpletuner_captions(settings), folder_rules)


def _simpletuner_captions(settings: dict[str, Any]) -> dict[str, Any]:
    # Some settings of captions take effect only together with others.
    prompt = settings.get("instance_prompt")
    if settings.pop("only_instance_prompt", False):
        settings["caption_strategy"] = "instanceprompt"
    if settings.pop("prepend_instance_prompt", False) and prompt:
        settings["prepend_instance_prompt"] = prompt
    if settings.get("caption_strategy") != "instanceprompt":
        settings.pop("instance_prompt", None)

    shuffle = {key: value for key, value in settings.items() if key.startswith("caption_shuffle.")}
    if not shuffle.pop("caption_shuffle.enable", False):
        return {key: value for key, value in settings.items() if not key.startswith("caption_shuffle.")}
    count = int(shuffle.get("caption_shuffle.count", 1))
    settings["caption_shuffle.count"] = count + bool(shuffle.get("caption_shuffle.include_original", True))
    separator = {"space": " ", "period": "."}.get(str(shuffle.get("caption_shuffle.split_on")), ",")
    settings["caption_shuffle.split_on"] = separator
    return settings


def _diffusion_pipe(data: Any, _file: Path) -> ForeignConfig | None:
    shared = {key: value for key, value in data.items() if key != "directory"}
    entries = [_diffusion_pipe_entry({**shared, **each}) for each in data["directory"]]
    return ForeignConfig("diffusion-pipe", entries)


def _diffusion_pipe_entry(settings: dict[str, Any]) -> ForeignDataset:
    remarks: tuple[str, ...] = ()
    low, high = settings.get("min_ar"), settings.get("max_ar")
    if low and high:
        # A recipe has one ratio of long to short edge, so the wider of the two limits applies.
        settings["max_ar"] = max(high, 1 / low)
        if not math.isclose(low * high, 1):
            remarks = (f"min_ar {low}, max_ar {high}: a recipe has one limit for both orientations",)
    if not settings.setdefault("enable_ar_bucket", False):
        settings = {
            key: each for key, each in settings.items() if key not in ("min_ar", "max_ar", "num_ar_buckets")
        }
    if settings.get("shuffle_tags") and not settings.get("cache_shuffle_num"):
        settings["cache_shuffle_num"] = 1
    return ForeignDataset(settings, FOLDER_RULES["diffusion-pipe"], remarks=remarks)


def _linked(name: Any, file: Path) -> Any:
    linked = _existing_file(str(name), file)
    if linked is None:
        fix = "pass that file instead"
        raise DatasetError(f"the file {name} does not exist", where=str(file.absolute()), fix=fix)
    return _parsed(linked)


def _lines(name: str, file: Path) -> list[str]:
    path = _existing_file(name, file)
    if path is None:
        return []
    return [line.strip() for line in path.read_text("utf-8", "replace").splitlines() if line.strip()]


def _existing_file(name: str, file: Path) -> Path | None:
    return next((path for path in candidate_paths(name, file) if path.is_file()), None)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
