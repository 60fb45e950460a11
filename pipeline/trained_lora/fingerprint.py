"""The facts that decide a run's weights, and the run id."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.errors import TrainingError
from pipeline.models.training_adapter import resolve_training_adapter
from pipeline.side_inputs import SIDE_INPUTS
from pipeline.storage.atomic import write_text
from pipeline.storage.regular_files import file_sha256
from pipeline.trained_lora.context_file import context_facts
from pipeline.trained_lora.inputs import IDENTITY, when_exhausted
from pipeline.trained_lora.recipe_facts import ALWAYS_PRESENT, RECIPE_FACTS, Facts
from pipeline.trained_lora.run_folder import RunLayout
from pipeline.versions import TRAINING_VERSION

if TYPE_CHECKING:
    from pipeline.cache.recipe_entries import RecipeEntries
    from pipeline.models.families import Family
    from pipeline.recipe import LoraSettings, Recipe, TrainingSettings
    from pipeline.trained_lora.inputs import TrainingInputs

DERIVED_KEYS = {
    "training.steps": "schedule: only if the learning rate depends on it, so that a longer run can resume",
    "training.epochs": "schedule: converted to steps",
    "training.lr_cycles": "schedule",
    "training.lr_power": "schedule",
    "training.decay_steps": "schedule",
    "training.exhausted": "plan: resolved, only with dataset weights",
    "training.loss.prior": "loss.prior: only with a dataset of role prior",
    "training.loss.prior_weight": "loss.prior: only with a dataset of role prior",
    "training.quantize": "quantize: `TrainingSettings.packing`",
    "training.compute": "quantize: `TrainingSettings.packing`",
    "training.lora.lokr_factor": "lora.lokr_factor: resolved, only for LoKr",
    "training.lora.oft_block_size": "lora.oft_block_size: resolved, only for OFT",
    "training.lora.start_from": "lora.start_from: hash of the file",
}
"""Keys of `training` that decide the weights by a computed fact, each with the fact."""

IRRELEVANT_KEYS = {
    "training.gradient_checkpointing": "the same arithmetic, computed twice",
    "training.offload": "only where frozen weights are between their uses",
    "training.checkpoint_every": "training does not read its checkpoints unless it resumes",
    "training.keep_checkpoints": "training does not read its checkpoints unless it resumes",
    "training.sample_every": "previews do not change the weights",
    "training.sample_prompts": "previews do not change the weights",
    "training.validate_every": "validation does not change the weights",
    "training.trackers": "they receive numbers and pictures only",
    "training.tracker_project": "trackers receive numbers and pictures only",
    "training.tracker_arguments": "trackers receive numbers and pictures only",
}
"""Keys of `training` that do not decide the weights, each with the reason."""

_FACTS_BY_DATASET = (
    ("plan", "weights"),
    ("plan", "caption_dropouts"),
    ("loss", "dataset_weights"),
    ("loss", "masks"),
    ("samples", "datasets"),
)
"""Facts, by section and key, that hold a value for the name of each dataset."""

_RUN_ID = re.compile(r"[0-9a-f]{16}")


def run_facts(recipe: Recipe, entries: RecipeEntries, inputs: TrainingInputs) -> Facts:
    """Return everything that decides the weights; paths and package versions do not.

    Datasets are named, so that people can read the facts. `run_id` replaces the names, unless the inputs are
    ordered by name.

    Raises:
        TrainingError: The LoRA in `start_from` or `context_lora` cannot be read.
        ModelError: The training adapter is missing, or cannot be downloaded.
    """
    facts: Facts = {
        "version": TRAINING_VERSION,
        "samples": {**_samples(inputs.trained), **_empty_texts(inputs.trained, recipe)},
        # Without dropout, the empty caption is not trained on.
        "empty_text": entries.text_spec("").key if any(recipe.caption_dropouts.values()) else None,
        "model": {
            "family": entries.family.spec.name,
            "denoiser": entries.fingerprint("denoiser"),
            **_training_adapter(recipe),
            **context_facts(recipe),
        },
        "plan": _mix(recipe, inputs),
        "loss": _loss(recipe, entries.family),
        "schedule": _schedule(recipe.training),
        "lora": _adapter(recipe.training.lora, entries.family),
        "mixed_precision": entries.family.mixed_precision(recipe.accelerate.mixed_precision),
        "quantize": recipe.training.packing,
    }
    _add_recipe_facts(facts, recipe)
    _resolve_caption_dropout(facts["plan"], recipe)

    facts["loss"]["timesteps"] |= _timesteps(recipe.training, entries.family)
    if inputs.is_by_content:
        facts["samples"] |= {"ordered_by": "content", **_members(inputs.trained, _named_datasets(facts))}
    if shares_casts(inputs, facts["mixed_precision"]):
        facts["shared_casts"] = True
    return facts


def shares_casts(inputs: TrainingInputs, mixed_precision: str) -> bool:
    """Return whether layers with the same input share its cast, which rounds sums of gradients differently.

    Runs of 0.3.0 and earlier, whose inputs are ordered by name, are resumed without it.
    """
    return inputs.is_by_content and mixed_precision != "no"


def _timesteps(training: TrainingSettings, family: Family) -> Facts:
    facts = family.timestep_facts()

    # As in `make_noise_scheduler`: the recipe's shift also replaces one that depends on the image's size.
    if facts and training.timesteps.shift is not None:
        facts |= {"shift": training.timesteps.shift, "use_dynamic_shifting": False}
    return facts


def _add_recipe_facts(facts: Facts, recipe: Recipe) -> None:
    values = recipe.model_dump(mode="json")
    for fact in RECIPE_FACTS:
        value: Any = values
        for name in fact.key.split("."):
            value = value[name]
        if fact.default is ALWAYS_PRESENT or value != fact.default:
            *sections, last = fact.name.split(".")
            section = facts
            for name in sections:
                section = section.setdefault(name, {})
            section[last] = value


def _resolve_caption_dropout(plan: Facts, recipe: Recipe) -> None:
    # One value for all datasets is the same training, whichever section it is written in.
    dropouts = recipe.caption_dropouts
    common = {*dropouts.values()}
    if len(common) == 1:
        plan["caption_dropout"] = common.pop()
    else:
        del plan["caption_dropout"]
        plan["caption_dropouts"] = dropouts


def _samples(inputs: TrainingInputs) -> Facts:
    table = inputs.table.with_columns(inputs.identities.alias(IDENTITY))
    latents = table.select(IDENTITY, "bucket", "latents").iter_rows()
    text = table.select(IDENTITY, "texts").iter_rows()
    facts: Facts = {
        "number": len(inputs),
        "latents": _digest((identity, bucket, *keys) for identity, bucket, keys in latents),
        "text": _digest((identity, *keys) for identity, keys in text),
        "repeats": _digest(table.select(IDENTITY, "repeats").iter_rows()),
    }

    # Facts without a value are absent, so that runs from before such a column existed have the same id.
    for side_input in SIDE_INPUTS:
        if side_input.plural not in table.columns:
            continue
        used = table.select(IDENTITY, side_input.plural).drop_nulls()
        if not used.is_empty():
            rows = (
                used.iter_rows() if side_input.several else ((name, *keys) for name, keys in used.iter_rows())
            )
            facts[side_input.plural] = _digest(rows)
    if "slider" in table.columns:
        facts["sliders"] = _digest(table.select(IDENTITY, "slider", "pair").iter_rows())
    return facts


def _empty_texts(inputs: TrainingInputs, recipe: Recipe) -> Facts:
    names = [name for name, dropout in recipe.caption_dropouts.items() if dropout > 0]
    if not names or "empty_text" not in inputs.table.columns:
        return {}
    table = inputs.table.with_columns(inputs.identities.alias(IDENTITY)).filter(
        pl.col("dataset").is_in(names)
    )
    empty_texts = table.select(IDENTITY, "empty_text").drop_nulls()
    return {"empty_texts": _digest(empty_texts.iter_rows())}


def _schedule(training: TrainingSettings) -> Facts:
    # A constant rate does not depend on the number of steps, so a longer run can resume a shorter one.
    if training.lr_scheduler == "constant":
        return {}

    # These are facts of all other schedules. A new setting here would change the ids of existing runs;
    # it belongs in RECIPE_FACTS, where its default is omitted.
    return {
        "steps": training.num_steps,
        "cycles": training.lr_cycles,
        "power": training.lr_power,
        "decay_steps": training.decay_steps,
    }


def _loss(recipe: Recipe, family: Family) -> Facts:
    return {
        **_prior(recipe),
        **_loss_weights(recipe),
        **_masks(recipe),
        "prediction": family.prediction_type(),
        "density": family.spec.noise.density,
        **_objective(family),
    }


def _adapter(lora: LoraSettings, family: Family) -> Facts:
    start = lora.start_from
    return {
        "start_from": None if start is None else _start_hash(start),
        # Otherwise the recipe's own targets or patterns decide, which are facts already.
        "family_targets": family.lora_targets() if lora.family_modules else None,
        # Resolved, because null and the default train the same weights.
        **({"lokr_factor": lora.kronecker_factor} if lora.kind == "lokr" else {}),
        **({"oft_block_size": lora.rotation_block} if lora.kind == "oft" else {}),
    }


def _loss_weights(recipe: Recipe) -> Facts:
    # Absent at the default, so that the runs of earlier releases keep their ids.
    weights = {each.name: each.loss_weight for each in recipe.datasets if each.loss_weight != 1.0}
    return {"dataset_weights": weights} if weights else {}


def _training_adapter(recipe: Recipe) -> Facts:
    path = resolve_training_adapter(recipe)
    return {} if path is None else {"training_adapter": file_sha256(path)}


def _objective(family: Family) -> Facts:
    # The ids of runs from before the first change of an objective do not contain its version.
    return {} if family.objective == 1 else {"objective": family.objective}


def _prior(recipe: Recipe) -> Facts:
    names = [each.name for each in recipe.datasets if each.role == "prior"]
    loss = recipe.training.loss
    return {"prior": {"datasets": names, "target": loss.prior, "weight": loss.prior_weight}} if names else {}


def _masks(recipe: Recipe) -> Facts:
    masks = {
        each.name: {
            "unmasked_weight": each.mask.unmasked_weight,
            "normalise": each.mask.normalise,
            # This key is newer than the first runs with masks; their ids do not contain it.
            **({"prior_weight": each.mask.prior_weight} if each.mask.prior_weight else {}),
        }
        for each in recipe.datasets
        if each.mask is not None
    }
    return {"masks": masks} if masks else {}


def _mix(recipe: Recipe, inputs: TrainingInputs) -> Facts:
    weights = {dataset.name: dataset.weight for dataset in recipe.datasets if dataset.weight is not None}
    # Without weights, no dataset can be exhausted.
    return {"weights": weights, "exhausted": when_exhausted(recipe, inputs)} if weights else {}


def _members(inputs: TrainingInputs, datasets: Iterable[str]) -> Facts:
    """Return the digest of the inputs of each of these datasets."""
    table = inputs.table.select("dataset", IDENTITY)
    digests = {
        name: _digest(table.filter(pl.col("dataset") == name).select(IDENTITY).iter_rows())
        for name in datasets
    }
    return {"datasets": digests} if digests else {}


def _named_datasets(facts: Facts) -> list[str]:
    """Return the datasets whose settings are among the facts, sorted by name."""
    by_name = [facts[section].get(key, {}) for section, key in _FACTS_BY_DATASET]
    prior = facts["loss"].get("prior", {}).get("datasets", ())
    return sorted({*prior, *(name for each in by_name for name in each)})


def with_dataset_names(facts: Facts, names: Mapping[str, str]) -> Facts:
    """Return the facts with other names of some datasets."""
    facts = {section: dict(value) if isinstance(value, dict) else value for section, value in facts.items()}
    for section, key in _FACTS_BY_DATASET:
        if key in facts.get(section, {}):
            facts[section][key] = {
                names.get(name, name): value for name, value in facts[section][key].items()
            }
    if "prior" in facts.get("loss", {}):
        prior = facts["loss"]["prior"]
        datasets = sorted(names.get(name, name) for name in prior["datasets"])
        facts["loss"]["prior"] = {**prior, "datasets": datasets}
    return facts


def run_id(facts: Facts) -> str:
    """Return the first 16 hex digits of the facts' hash; names of datasets are replaced by their contents."""
    if contents := facts.get("samples", {}).get("datasets"):
        facts = with_dataset_names(facts, contents)
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()[:16]


def is_run_id(name: str) -> bool:
    """Return whether `name` has the form of `run_id`; folders of other programs do not."""
    return _RUN_ID.fullmatch(name) is not None


def write_facts(layout: RunLayout, facts: Facts) -> None:
    """Write the facts, with which later runs are compared (`differences`)."""
    write_text(layout.facts, json.dumps(facts, indent=2, sort_keys=True) + "\n")


def _start_hash(path: Path) -> str:
    try:
        return file_sha256(path)
    except OSError as err:
        raise TrainingError(
            f"the LoRA to start from cannot be read: {err}",
            where=f"training.lora.start_from: {path}",
            fix="set start_from to a readable LoRA file, or remove the key",
        ) from err


def _digest(rows: Iterator[tuple[Any, ...]]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row).encode("utf-8") + b"\n")
    return digest.hexdigest()
