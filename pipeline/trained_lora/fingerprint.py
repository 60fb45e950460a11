"""What decides a run's weights, the run's id made of it, and what differs between two runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import TrainingError
from pipeline.storage.atomic import write_text
from pipeline.trained_lora.run_folder import RunLayout
from pipeline.versions import TRAINING_VERSION

if TYPE_CHECKING:
    from pipeline.cache.requests import RecipeEntries
    from pipeline.recipe import LoraSettings, Recipe
    from pipeline.trained_lora.samples import TrainingInputs

Facts = dict[str, Any]
"""JSON-serialisable, nested."""


def run_facts(recipe: Recipe, entries: RecipeEntries, inputs: TrainingInputs) -> Facts:
    """Everything that decides the weights, and nothing else.

    Not in it: how often checkpoints and pictures are made, paths and names, package versions, and the number
    of steps where the schedule does not depend on it, so that a longer run goes on from a shorter one.

    Raises:
        TrainingError: The LoRA to start from cannot be read.
    """
    training = recipe.training
    schedule: Facts = {"kind": training.lr_scheduler, "warmup_steps": training.warmup_steps}
    if training.lr_scheduler != "constant":
        schedule |= {"steps": training.num_steps, "cycles": training.lr_cycles, "power": training.lr_power}
        schedule |= {"decay_steps": training.decay_steps}
    dropout = recipe.text.caption_dropout
    start = training.lora.start_from
    return {
        "version": TRAINING_VERSION,
        "samples": _samples(inputs.trained),
        "empty_text": entries.text_spec("").key if dropout > 0 else None,
        "model": {"family": entries.family.name, "denoiser": entries.fingerprint("denoiser")},
        "plan": {
            "seed": training.seed,
            "batch_size": training.batch_size,
            "gradient_accumulation": training.gradient_accumulation,
            "num_processes": recipe.accelerate.num_processes,
            "caption_dropout": dropout,
            "underfilled": recipe.buckets.underfilled,
            **_mix(recipe),
        },
        "loss": {
            **training.loss.model_dump(),
            "prediction": entries.family.prediction_type(),
            "timesteps": {**training.timesteps.model_dump(), **entries.family.timestep_facts()},
            "density": entries.family.density,
        },
        "noise": training.noise.model_dump(),
        "optimizer": {
            "kind": training.optimizer,
            "arguments": training.optimizer_arguments.given(),
            "learning_rate": training.learning_rate,
            "max_grad_norm": training.max_grad_norm,
            "ema_decay": training.ema_decay,
        },
        "schedule": schedule,
        "lora": {
            **_adapter(training.lora),
            "start_from": None if start is None else _file_hash(start),
            "family_targets": entries.family.lora_targets() if training.lora.family_modules else None,
        },
        "mixed_precision": recipe.accelerate.mixed_precision,
        "quantize": training.quantize,
        "compile": training.compile,
    }


def _samples(inputs: TrainingInputs) -> Facts:
    table = inputs.table
    latents = table.select("variant_id", "bucket", "latents").iter_rows()
    text = table.select("variant_id", "texts").iter_rows()
    return {
        "number": len(inputs),
        "latents": _digest((variant_id, bucket, *keys) for variant_id, bucket, keys in latents),
        "text": _digest((variant_id, *keys) for variant_id, keys in text),
        "repeats": _digest(table.select("variant_id", "repeats").iter_rows()),
    }


def _adapter(lora: LoraSettings) -> Facts:
    left_out = {"start_from", "lokr_factor"} | ({"text_encoders"} if lora.text_encoders is None else set())
    facts = lora.model_dump(mode="json", exclude=left_out)
    return {**facts, "lokr_factor": lora.kronecker_factor} if lora.kind == "lokr" else facts


def _mix(recipe: Recipe) -> Facts:
    weights = {each.name: each.weight for each in recipe.datasets if each.weight is not None}
    return {"weights": weights, "exhausted": recipe.training.exhausted} if weights else {}


def run_id(facts: Facts) -> str:
    """16 hex digits of a hash of the facts; no time is in it."""
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()[:16]


def write_facts(layout: RunLayout, facts: Facts) -> None:
    """Keep the facts in the run's folder, for `describe_difference`."""
    write_text(layout.facts, json.dumps(facts, indent=2, sort_keys=True) + "\n")


def say_what_differs(runs: Path, run: str, facts: Facts, log: Callable[[str], None]) -> None:
    """Say through `log` what sets a new run apart from the one made last (FAILURES R11).

    Args:
        runs: The folder of all runs of one recipe.
        run: The new run's id.
        facts: Its facts.
        log: Takes one line; nothing is said of a first run.
    """
    others = [path for path in runs.glob("*/run.json") if path.parent.name != run]
    if not others:
        return
    newest = max(others, key=lambda path: path.stat().st_mtime_ns)
    try:
        before = json.loads(newest.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        log(f"run {run} lies beside {newest.parent.name}, whose {newest.name} cannot be read: {err}")
        return
    differences = "; ".join(describe_difference(before, facts))
    log(f"run {run} is new beside {newest.parent.name}: {differences}")


def describe_difference(before: Facts, after: Facts) -> list[str]:
    """`<fact> <old> -> <new>` of each fact that differs, by name; hashes shortened."""
    old, new = dict(_flat(before)), dict(_flat(after))
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    return [f"{name} {_short(old.get(name))} -> {_short(new.get(name))}" for name in names]


def _file_hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as err:
        fix = "name a LoRA file, or remove the key"
        what = f"the LoRA to start from cannot be read: {err}"
        raise TrainingError(what, where=f"training.lora.start_from: {path}", fix=fix) from err


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _short(value: object) -> str:
    text = str(value)
    return f"{text[:8]}..." if len(text) >= 32 else text


def _digest(rows: Iterator[tuple[str | int, ...]]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row).encode("utf-8") + b"\n")
    return digest.hexdigest()
