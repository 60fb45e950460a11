"""The stage `trained_lora`, in the process that launches: verify, name the run, train it once, publish.

Torch-free: a finished run that nothing has changed for launches nothing.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from pipeline.aspect_buckets import checks as aspect_buckets
from pipeline.cache.requests import RecipeEntries
from pipeline.checks.findings import CheckContext, closed_gates_error
from pipeline.images.geometry import placement_of
from pipeline.raw_images import checks as raw_images
from pipeline.recipe import differing, with_overrides
from pipeline.reporting.reports import Log, Report, StageResult, Stopwatch
from pipeline.storage.atomic import write_atomically, write_bytes, write_text
from pipeline.storage.tables import SCHEMAS, Tables, empty, in_order, only, validated
from pipeline.text_embeddings import checks as text_embeddings
from pipeline.trained_lora.export.lora_files import PROVENANCE_FILE, SAMPLES_FILE
from pipeline.trained_lora.export.model_card import CARD_FILE, SHEET_FILE, model_card
from pipeline.trained_lora.export.publish import (
    accept_result,
    copy_changed,
    mark_finished,
    publish,
    read_finished,
)
from pipeline.trained_lora.fingerprint import Facts, run_facts, run_id, say_what_differs, write_facts
from pipeline.trained_lora.job import Prompt, TrainingJob, with_steps
from pipeline.trained_lora.locking import only_one
from pipeline.trained_lora.objective import require_objective, require_text_encoders, require_trackers
from pipeline.trained_lora.provenance import caption_hash, provenance
from pipeline.trained_lora.report import LOSSES_FILE, hardest, write_run_report
from pipeline.trained_lora.run_folder import RunLayout, read_metrics
from pipeline.trained_lora.sample_losses import loss_trend
from pipeline.trained_lora.samples import TrainingInputs, training_inputs
from pipeline.vae_latents import checks as vae_latents
from pipeline.validated_dataset import checks as validated_dataset

if TYPE_CHECKING:
    from pipeline.processes.launch import Launch
    from pipeline.recipe import Recipe

_ASKED = {
    "raw_images": raw_images,
    "validated_dataset": validated_dataset,
    "aspect_buckets": aspect_buckets,
    "vae_latents": vae_latents,
    "text_embeddings": text_embeddings,
}
"""The checks of what is trained on, in the order of the job."""

NO_OVERRIDES: Mapping[str, Any] = {}

MODULE = "pipeline.trained_lora.worker"

NUM_DEFAULT_PROMPTS = 2
"""Of sample pictures, where the recipe names no prompts."""

CURVE_POINTS = 100


def train_lora(
    recipe: Recipe,
    latents: pl.DataFrame,
    text: pl.DataFrame,
    *,
    launch: Launch,
    log: Log,
    overrides: Mapping[str, Any] = NO_OVERRIDES,
) -> StageResult:
    """Train the recipe's LoRA, or find it trained; afterwards `output_dir/lora` holds it.

    Args:
        recipe: With absolute paths.
        latents: The table of vae_latents.
        text: The table of text_embeddings.
        launch: Runs the training processes.
        log: Takes progress lines.
        overrides: Settings of this run in place of the recipe's, by names of `recipe.OVERRIDABLE`.

    Returns:
        One row a sample, with the number of times it was trained on.

    Raises:
        GateClosedError: A gate of what is trained on is closed (FAILURES O10); nothing was launched.
        TrainingError: Training failed, or left no usable result.
        LaunchError: The training processes died or were stopped; a checkpoint is kept.
        RecipeError: The overrides are wrong, or don't go with the recipe.
    """
    watch = Stopwatch()
    changes = differing(recipe, overrides)
    recipe = with_overrides(recipe, changes)
    if changes:
        log(f"in place of what the recipe says: {', '.join(f'{k} {v}' for k, v in changes.items())}")
    require_valid_inputs(recipe)
    order, facts, table = _planned(recipe, latents, text, changes)
    recipe, epochs, layout = order.recipe, recipe.training.epochs, RunLayout(order.folder)
    with only_one(layout.lock, log):
        finished = read_finished(layout, steps=recipe.training.num_steps, recipe_name=recipe.name)
        launched = finished is None
        if finished is None:
            finished = _train(order, facts, table, launch=launch, log=log)
            watch.startup_s = finished["startup_s"]
        else:
            log(f"run {order.run} is finished and unchanged: nothing is launched")
        if finished.get("epochs") != epochs:
            finished["epochs"] = epochs
            mark_finished(layout, finished)
        replaced = publish(layout, recipe.output_dir / "lora", finished)
        if not (layout.report / LOSSES_FILE).is_file():
            write_run_report(order, layout)
        copy_changed(layout.report, recipe.output_dir / "reports" / "trained_lora")
    log(f"lora/ holds run {order.run}" + (f": {', '.join(replaced)} replaced" if replaced else ", as before"))
    report = _report(order, finished, launched=launched)
    report |= {"overrides": changes, **watch.numbers()}
    return StageResult(table, empty("rejected"), report)


def _planned(
    recipe: Recipe, latents: pl.DataFrame, text: pl.DataFrame, overrides: Mapping[str, Any]
) -> tuple[TrainingJob, Facts, pl.DataFrame]:
    """What is trained, with its provenance; what the run's id is made of; and the table of trained_lora."""
    entries = RecipeEntries(recipe)
    require_objective(recipe.training, entries.family.prediction_type())
    require_text_encoders(recipe.training, entries.family)
    require_trackers(recipe.training)
    inputs = training_inputs(recipe, entries, latents, text)
    recipe = with_steps(recipe, inputs)
    facts = run_facts(recipe, entries, inputs)
    order = TrainingJob(
        recipe=recipe,
        base=entries.model_folder,
        component_folders=entries.component_folders,
        run=run_id(facts),
        inputs=inputs,
        empty_text=entries.text_spec(""),
        prompts=sample_prompts(recipe, entries, inputs),
    )
    table = trained_table(latents, order)
    origin = {**provenance(recipe, entries, facts, table), "overrides": dict(overrides)}
    return replace(order, provenance=origin), facts, table


def require_valid_inputs(recipe: Recipe) -> None:
    """Ask all gates up to the caches, as the recipe now reads: training never starts on what one refuses.

    They are asked of tables and cache. The datasets are not looked at: they may be gone.

    Raises:
        GateClosedError: Names every closed gate, as its own check does.
        TableError: A table is missing.
    """
    context = CheckContext(recipe, Tables(recipe.output_dir), sources=False)
    closed = {
        f"{recipe.name}/{asset}": [finding for finding in check.run(context) if finding.closes]
        for asset, check in _ASKED.items()
    }
    if any(closed.values()):
        raise closed_gates_error({asset: findings for asset, findings in closed.items() if findings})


def sample_prompts(recipe: Recipe, entries: RecipeEntries, inputs: TrainingInputs) -> tuple[Prompt, ...]:
    """What is drawn while training: the recipe's prompts, as squares; or the first captions."""
    if recipe.training.sample_every == 0:
        return ()
    largest = placement_of(recipe.buckets).sets[-1]
    square = min(largest.sizes, key=lambda size: (max(size) / min(size), -size.height))
    if recipe.training.sample_prompts:
        return tuple(Prompt(text, entries.text_spec(text), square) for text in recipe.training.sample_prompts)
    captions = inputs.table["captions"].list.first()
    chosen = map(inputs.__getitem__, captions.is_first_distinct().arg_true()[:NUM_DEFAULT_PROMPTS])
    return tuple(
        Prompt(item.variants[0].caption, item.variants[0].entry, item.target_size_hw) for item in chosen
    )


def trained_table(latents: pl.DataFrame, order: TrainingJob) -> pl.DataFrame:
    """The table of trained_lora: which sample, by which entries, how often over the whole plan."""
    inputs = order.inputs.table
    seen = np.zeros(len(inputs), dtype=np.int32)
    seen[~inputs["held_out"].to_numpy()] = order.plan().times_seen()
    samples = inputs.select(
        "bucket",
        "sample_id",
        latent_keys=pl.col("latents").list.join(" "),
        text_keys=pl.col("texts").list.join(" "),
        caption_hashes=pl.Series(map(_hashes, inputs["captions"]), dtype=pl.String),
        split=pl.when("held_out").then(pl.lit("validation")).otherwise(pl.lit("train")),
        times_seen=pl.Series(seen),
    )
    joined, of_one = (
        pl.col("bucket", "latent_keys").str.join(" "),
        pl.col("text_keys", "caption_hashes", "split"),
    )
    if samples["sample_id"].is_duplicated().any():  # of an image with several buckets
        by_image = samples.group_by("sample_id", maintain_order=True)
        samples = by_image.agg(joined, of_one.first(), pl.col("times_seen").sum())
    images = latents.select("sample_id", "dataset", "path", "content_hash", "height", "width")
    images = only(images, images["sample_id"].is_first_distinct())
    table = images.join(samples, on="sample_id", how="left").select(SCHEMAS["trained_lora"].keys())
    return validated("trained_lora", in_order(table, ["sample_id"]), "what the run is trained on")


def _hashes(captions: Iterable[str]) -> str:
    return " ".join(map(caption_hash, captions))


def _train(
    order: TrainingJob, facts: Facts, table: pl.DataFrame, *, launch: Launch, log: Log
) -> dict[str, Any]:
    layout = RunLayout(order.folder)
    if not layout.facts.is_file():
        say_what_differs(order.folder.parent, order.run, facts, log)
    write_facts(layout, facts)
    for stale in (layout.result, layout.finished):
        with suppress(FileNotFoundError):
            stale.unlink()
    launched_at_s = time.time()
    launch(MODULE, order.write())
    returned_at_s = time.time()
    recipe = order.recipe
    result = accept_result(layout, run=order.run, steps=len(order.plan()), recipe_name=recipe.name)
    result["loss_trend"] = loss_trend(layout, len(order.plan()))
    # What comes before the first and after the last of the work: imports, the model, a process's end.
    result["startup_s"] = max(
        0.0, returned_at_s - launched_at_s - result["ended_at_s"] + result["started_at_s"]
    )
    shutil.rmtree(layout.report, ignore_errors=True)
    write_run_report(order, layout)
    _write_beside(order, layout, table, result)
    mark_finished(layout, result)
    return result


def _write_beside(order: TrainingJob, layout: RunLayout, table: pl.DataFrame, result: dict[str, Any]) -> None:
    """What lies beside the LoRA files: their table, pictures, card, and provenance."""
    write_atomically(layout.exported / SAMPLES_FILE, table.write_parquet)
    sheet = layout.report / SHEET_FILE
    if sheet.is_file():
        write_bytes(layout.exported / SHEET_FILE, sheet.read_bytes())
    prompts = [prompt.caption for prompt in order.prompts]
    card = model_card(order.provenance, steps=result["steps"], prompts=prompts, has_pictures=sheet.is_file())
    write_text(layout.exported / CARD_FILE, card)
    made = {name: result[name] for name in ("run", "steps", "device", "files")}
    record = {**made, **order.provenance}
    write_text(layout.exported / PROVENANCE_FILE, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def _report(order: TrainingJob, finished: dict[str, Any], *, launched: bool) -> Report:
    metrics = read_metrics(RunLayout(order.folder).metrics, len(order.plan()))
    losses = [line["loss"] for line in metrics]
    tenth = max(1, len(losses) // 10)
    every = max(1, -(-len(metrics) // CURVE_POINTS))
    validation = read_metrics(RunLayout(order.folder).validation, len(order.plan()) + 1)
    return {
        "samples": len(order.inputs),
        "held_out": int(order.inputs.table["held_out"].sum()),
        "run": order.run,
        "launched": launched,
        "steps": finished["steps"],
        "resumed_from": finished["resumed_from"],
        "first_loss": _mean(losses[:tenth]),
        "last_loss": _mean(losses[-tenth:]),
        "loss_curve": [[line["step"], line["loss"]] for line in metrics[::every]],
        "first_validation_loss": validation[0]["loss"] if validation else None,
        "last_validation_loss": validation[-1]["loss"] if validation else None,
        "hardest_samples": hardest(RunLayout(order.folder)),
        "last_learning_rate": metrics[-1]["learning_rate"] if metrics else None,
        "num_weights": finished["num_weights"],
        "device": finished["device"],
        "peak_memory_bytes": finished["peak_memory_bytes"],
        "warnings": finished["warnings"],
        "files": {item["name"]: item["bytes"] for item in finished["files"]},
        "plan": order.plan().numbers(),
    }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
