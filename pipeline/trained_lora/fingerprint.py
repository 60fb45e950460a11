"""The fingerprint of a run: the facts that decide its weights, the run id, and differences between runs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import TrainingError
from pipeline.models.training_adapter import resolve_training_adapter
from pipeline.side_inputs import SIDE_INPUTS
from pipeline.storage.atomic import write_text
from pipeline.trained_lora.run_folder import RunLayout
from pipeline.versions import TRAINING_VERSION

if TYPE_CHECKING:
    from pipeline.cache.recipe_entries import RecipeEntries
    from pipeline.models.families import Family
    from pipeline.recipe import LoraSettings, Recipe, TrainingSettings
    from pipeline.trained_lora.inputs import TrainingInputs

Facts = dict[str, Any]
"""Nested, JSON-serializable facts."""

ADDED_LORA_KEYS = frozenset(["learning_rates", "loraplus_ratio", "save_dtype"])
"""Keys of `training.lora` that are part of a run's facts only if a recipe sets them."""

_RUN_ID = re.compile(r"[0-9a-f]{16}")


def run_facts(recipe: Recipe, entries: RecipeEntries, inputs: TrainingInputs) -> Facts:
    """Return everything that decides the weights, and nothing else.

    Excluded are the intervals of checkpoints and previews, paths, names and package versions. The number of
    steps is included only if the learning rate schedule depends on it, so that a longer run can resume a
    shorter one.

    Raises:
        TrainingError: The LoRA in `start_from` cannot be read.
        ModelError: The training adapter is missing, or cannot be downloaded.
    """
    training = recipe.training
    dropout = recipe.text.caption_dropout
    start = training.lora.start_from

    return {
        "version": TRAINING_VERSION,
        "samples": {**_samples(inputs.trained), **_empty_texts(inputs.trained, dropout)},
        "empty_text": entries.text_spec("").key if dropout > 0 else None,
        "model": {
            "family": entries.family.name,
            "denoiser": entries.fingerprint("denoiser"),
            **_training_adapter(recipe),
        },
        "plan": {
            "seed": training.seed,
            "batch_size": training.batch_size,
            "gradient_accumulation": training.gradient_accumulation,
            "num_processes": recipe.accelerate.num_processes,
            "caption_dropout": dropout,
            "underfilled": recipe.buckets.underfilled,
            **_mix(recipe),
        },
        "loss": _loss(recipe, entries.family),
        "noise": training.noise.model_dump(),
        "optimizer": {
            "kind": training.optimizer,
            "arguments": training.optimizer_arguments.given(),
            "learning_rate": training.learning_rate,
            "max_grad_norm": training.max_grad_norm,
            "ema_decay": training.ema_decay,
        },
        "schedule": _schedule(training),
        "lora": {
            **_adapter(training.lora),
            "start_from": None if start is None else _start_hash(start),
            "family_targets": entries.family.lora_targets() if training.lora.family_modules else None,
        },
        "mixed_precision": entries.family.mixed_precision(recipe.accelerate.mixed_precision),
        "quantize": training.packing,
        "compile": training.compile,
    }


def _samples(inputs: TrainingInputs) -> Facts:
    table = inputs.table
    latents = table.select("variant_id", "bucket", "latents").iter_rows()
    text = table.select("variant_id", "texts").iter_rows()
    facts: Facts = {
        "number": len(inputs),
        "latents": _digest((variant_id, bucket, *keys) for variant_id, bucket, keys in latents),
        "text": _digest((variant_id, *keys) for variant_id, keys in text),
        "repeats": _digest(table.select("variant_id", "repeats").iter_rows()),
    }

    # Facts without a value are absent, so that runs from before such a column existed have the same id.
    for side_input in SIDE_INPUTS:
        if side_input.plural not in table.columns:
            continue
        used = table.select("variant_id", side_input.plural).drop_nulls()
        if not used.is_empty():
            rows = (
                used.iter_rows() if side_input.several else ((name, *keys) for name, keys in used.iter_rows())
            )
            facts[side_input.plural] = _digest(rows)
    if "slider" in table.columns:
        facts["sliders"] = _digest(table.select("variant_id", "slider", "pair").iter_rows())
    return facts


def _empty_texts(inputs: TrainingInputs, dropout: float) -> Facts:
    """Return a digest of the empty captions with references, if dropout trains any."""
    if not dropout or "empty_text" not in inputs.table.columns:
        return {}
    empty_texts = inputs.table.select("variant_id", "empty_text").drop_nulls()
    return {"empty_texts": _digest(empty_texts.iter_rows())}


def _schedule(training: TrainingSettings) -> Facts:
    facts: Facts = {"kind": training.lr_scheduler, "warmup_steps": training.warmup_steps}
    if training.lr_scheduler != "constant":
        facts |= {"steps": training.num_steps, "cycles": training.lr_cycles, "power": training.lr_power}
        facts |= {"decay_steps": training.decay_steps}
    return facts


def _loss(recipe: Recipe, family: Family) -> Facts:
    """Return what decides the loss of a batch.

    Runs of earlier versions keep their ids, because settings which those lacked are included only if they
    are used.
    """
    training = recipe.training
    return {
        **training.loss.model_dump(exclude={"prior", "prior_weight"}),
        **_prior(recipe),
        **_loss_weights(recipe),
        **_masks(recipe),
        "prediction": family.prediction_type(),
        "timesteps": {**training.timesteps.model_dump(), **family.timestep_facts()},
        "density": family.density,
        **_objective(family),
    }


def _adapter(lora: LoraSettings) -> Facts:
    excluded = {"start_from", "lokr_factor"}
    if lora.text_encoders is None:
        excluded.add("text_encoders")

    # These keys are newer than the first runs, whose ids do not contain them.
    fields = type(lora).model_fields
    excluded |= {key for key in ADDED_LORA_KEYS if getattr(lora, key) == fields[key].default}
    facts = lora.model_dump(mode="json", exclude=excluded)
    return {**facts, "lokr_factor": lora.kronecker_factor} if lora.kind == "lokr" else facts


def _loss_weights(recipe: Recipe) -> Facts:
    weights = {each.name: each.loss_weight for each in recipe.datasets if each.loss_weight != 1.0}
    return {"dataset_weights": weights} if weights else {}


def _training_adapter(recipe: Recipe) -> Facts:
    path = resolve_training_adapter(recipe)
    return {} if path is None else {"training_adapter": file_sha256(path)}


def _objective(family: Family) -> Facts:
    """Return the version of the family's objective; ids of runs with the first one do not contain it."""
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
            # This key is newer than the first runs with masks, whose ids do not contain it.
            **({"prior_weight": each.mask.prior_weight} if each.mask.prior_weight else {}),
        }
        for each in recipe.datasets
        if each.mask is not None
    }
    return {"masks": masks} if masks else {}


def _mix(recipe: Recipe) -> Facts:
    weights = {dataset.name: dataset.weight for dataset in recipe.datasets if dataset.weight is not None}
    return {"weights": weights, "exhausted": recipe.training.exhausted} if weights else {}


def run_id(facts: Facts) -> str:
    """Return the first 16 hex digits of the facts' hash."""
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()[:16]


def is_run_id(name: str) -> bool:
    """Return whether `name` has the form of `run_id`; folders of other programs do not."""
    return _RUN_ID.fullmatch(name) is not None


def write_facts(layout: RunLayout, facts: Facts) -> None:
    """Write the facts into the run's folder, for `log_differences` of later runs."""
    write_text(layout.facts, json.dumps(facts, indent=2, sort_keys=True) + "\n")


def log_differences(runs: Path, run: str, facts: Facts, *, log: Callable[[str], None]) -> None:
    """Log how a new run differs from the most recent earlier one, if there is one (FAILURES R11).

    `runs` is the folder of all runs of the recipe.
    """
    earlier_runs = [path for path in runs.glob("*/run.json") if path.parent.name != run]
    if not earlier_runs:
        return
    latest = max(earlier_runs, key=lambda path: path.stat().st_mtime_ns)
    try:
        latest_facts = json.loads(latest.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        log(f"run {run} is new; how it differs from {latest.parent.name} is unknown: {latest}: {err}")
        return
    differences = "; ".join(describe_difference(latest_facts, facts))
    log(f"run {run} is new; it differs from {latest.parent.name} in {differences}")


def describe_difference(before: Facts, after: Facts) -> list[str]:
    """Return "<fact> <old> -> <new>" for each fact that differs, sorted by name, with hashes shortened."""
    old, new = dict(_flatten(before)), dict(_flatten(after))
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    return [f"{name} {_shorten(old.get(name))} -> {_shorten(new.get(name))}" for name in names]


def file_sha256(path: Path) -> str:
    """Return the file's SHA-256 in hexadecimal.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _start_hash(path: Path) -> str:
    try:
        return file_sha256(path)
    except OSError as err:
        raise TrainingError(
            f"the LoRA to start from cannot be read: {err}",
            where=f"training.lora.start_from: {path}",
            fix="set start_from to a readable LoRA file, or remove the key",
        ) from err


def _flatten(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shorten(value: object) -> str:
    text = str(value)
    return f"{text[:8]}..." if len(text) >= 32 else text


def _digest(rows: Iterator[tuple[Any, ...]]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row).encode("utf-8") + b"\n")
    return digest.hexdigest()
