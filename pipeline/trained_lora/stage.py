"""Stage 6, trained_lora: check the inputs, name the run, train it once, publish the LoRA."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import polars as pl

from pipeline.aspect_buckets import checks as aspect_buckets
from pipeline.cache.recipe_entries import SEEN, RecipeEntries
from pipeline.cache.used_keys import KeyLists
from pipeline.captions import checks as captions
from pipeline.errors import TrainingError, counted
from pipeline.log import NOTE, Log
from pipeline.models.families import detect
from pipeline.models.hub import snapshot_commit
from pipeline.models.recipe_support import (
    require_preview_prompts,
    require_references,
    require_training_settings,
)
from pipeline.models.training_adapter import resolve_training_adapter
from pipeline.outputs.folder import outputs_of
from pipeline.processes.launch import TRAINING_MODULE
from pipeline.raw_images import checks as raw_images
from pipeline.recipe import changed_values, recipe_values, with_overrides
from pipeline.recipe.overrides import CONTINUE
from pipeline.reporting.findings import CheckContext, closed_gates_error
from pipeline.reporting.progress import duration_text
from pipeline.reporting.reports import Report, StageResult, Stopwatch
from pipeline.side_inputs import REFERENCES, SIDE_INPUTS
from pipeline.storage.atomic import OLD_S, remove_temp_files
from pipeline.storage.tables import Tables, columns_in, empty, validated
from pipeline.text_embeddings import checks as text_embeddings
from pipeline.text_embeddings.caption_rows import with_seen_images
from pipeline.text_embeddings.stage import needed_texts
from pipeline.trained_lora.continued import (
    FACT,
    Continued,
    choose_continued,
    continued_record,
    prepare_continued,
)
from pipeline.trained_lora.duration import expected_duration, record_duration
from pipeline.trained_lora.export.earlier_step import exported_step, forget_exported_step, publish_step
from pipeline.trained_lora.export.lora_files import LORA_FOLDER, lora_file_names
from pipeline.trained_lora.export.publish import (
    accept_result,
    mark_finished,
    mirror_folder,
    publish,
    saved_result,
)
from pipeline.trained_lora.fingerprint import run_id, write_facts
from pipeline.trained_lora.finished_run import complete_run, repaired_run, write_job
from pipeline.trained_lora.identities import planned_run
from pipeline.trained_lora.inputs import training_inputs
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.next_action import next_action
from pipeline.trained_lora.prompts import preview_prompts
from pipeline.trained_lora.provenance import caption_hash, provenance
from pipeline.trained_lora.recipe_facts import Facts
from pipeline.trained_lora.report import LOSSES_FILE, hardest_samples, write_run_report
from pipeline.trained_lora.run_folder import RunLayout, hold_run, lora_steps, read_metrics
from pipeline.trained_lora.run_upload import uploaded_run
from pipeline.trained_lora.sample_losses import loss_trend, share_below_half
from pipeline.trained_lora.start_file import require_start_file
from pipeline.trained_lora.supported_settings import require_supported_settings, require_trackers
from pipeline.vae_latents import checks as vae_latents
from pipeline.validated_dataset import checks as validated_dataset

if TYPE_CHECKING:
    from pipeline.processes.launch import Launch
    from pipeline.recipe import Recipe

_UPSTREAM_CHECKS = {
    "raw_images": raw_images,
    "validated_dataset": validated_dataset,
    "aspect_buckets": aspect_buckets,
    "vae_latents": vae_latents,
    "text_embeddings": text_embeddings,
}
"""Checks of the upstream assets of every recipe, in the order of the graph."""

Source = Literal["finished run", "checkpoint", "training"]
"""Where a job gets its LoRA from: a run without changes, a checkpoint of a longer run, or a training."""

NO_OVERRIDES: Mapping[str, Any] = {}

MAX_SHARE_DIFFERENCE = 0.02
"""Difference between a dataset's share of the training samples and its weight above which the log warns."""

CURVE_POINTS = 100
"""Maximum number of points of the loss curve in the report."""


def train_lora(
    recipe: Recipe,
    latents: pl.DataFrame,
    text: pl.DataFrame,
    *,
    launch: Launch,
    log: Log,
    overrides: Mapping[str, Any] = NO_OVERRIDES,
) -> StageResult:
    """Train the recipe's LoRA unless its run is already finished, and publish it to `output_dir/lora`.

    `overrides` are settings of this run that replace the recipe's, by names in `recipe.OVERRIDABLE`, and
    `CONTINUE`, the run that a new run takes weights, optimizer and steps from.

    Raises:
        GateClosedError: An upstream gate is closed (FAILURES O10); nothing was launched.
        TrainingError: The LoRA in `start_from` cannot be used, training failed, or left no usable result.
        LaunchError: The worker died or was stopped; its last checkpoint remains.
        RecipeError: The overrides are invalid or contradict the recipe, or a preview prompt or the references
            do not suit the base model.
    """
    watch = Stopwatch()
    changes = changed_values(recipe, overrides)
    recipe = with_overrides(recipe, changes)
    if changes:
        log(f"overridden for this run: {', '.join(f'{name} {value}' for name, value in changes.items())}")
    require_start_file(recipe)
    entries = RecipeEntries(recipe, log=log)
    used = KeyLists(recipe.cache_dir, _used_keys(entries, latents, text), log=log)
    # Before the gates find each entry in the cache, so that latentline gc deletes none of them after that.
    used.mark()
    require_open_gates(recipe, log=log)

    # A run is the same whether its length is given in epochs or in steps, so its recipe always counts steps.
    epochs = recipe.training.epochs
    wanted = overrides.get(CONTINUE)
    job, facts, table = plan_run(entries, latents, text, overrides=changes, continue_run=wanted, log=log)
    recipe, layout = job.recipe, RunLayout(job.folder)
    for warning in share_warnings(job, table):
        log(f"warning: {warning}")

    # The run is locked before it is fetched, because fetching replaces files in its folder.
    with used.kept_marked(), hold_run(layout, log), uploaded_run(recipe, layout, log) as run:
        # Old ones only: another machine of a training may write into this folder without the lock.
        remove_temp_files(layout.folder, min_age_s=OLD_S)
        finished, source = _finished(entries, job, facts, table, launch=run.uploading(launch), log=log)
        if source == "training":
            watch.startup_s = finished["startup_s"]
        _record_epochs(layout, finished, epochs)
        with run.publishing():
            published_step = _publish(job, finished, source=source, log=log)
        if not (layout.report / LOSSES_FILE).is_file():
            write_run_report(job, layout)
        mirror_folder(layout.report, recipe.output_dir / "reports" / "trained_lora")

    report = _report(job, finished, source=source)
    report["dataset_shares"] = dataset_shares(job, table)
    report |= {"published_step": published_step, "overrides": changes, **watch.numbers()}
    return StageResult(table, empty("rejected"), report)


def _used_keys(entries: RecipeEntries, latents: pl.DataFrame, text: pl.DataFrame) -> list[pl.Series]:
    # Divided like the keys of the cache jobs, so that a training after these jobs writes no lists.
    by_kind: dict[str, list[pl.Series]] = {"latents": [latents["key"]]}
    for side_input in SIDE_INPUTS:
        if side_input.keys_column in latents.columns:
            keys = latents[side_input.keys_column].drop_nulls().str.split(" ").explode()
            by_kind.setdefault(side_input.kind, []).append(keys)

    # The empty caption and the preview prompts have no row.
    texts = needed_texts(entries, with_seen_images(entries, text.clear()))
    more_texts = entries.text_keys(texts["caption"], texts.get_column(SEEN, default=None))
    by_kind["text"] = [text["key"], more_texts]
    return [pl.concat(parts) for parts in by_kind.values()]


def _record_epochs(layout: RunLayout, finished: dict[str, Any], epochs: float | None) -> None:
    # It may have changed since the run ended: runs count steps, and other epochs may have the same steps.
    if finished.get("epochs") != epochs:
        finished["epochs"] = epochs
        mark_finished(layout, finished)


def require_open_gates(recipe: Recipe, *, log: Log) -> None:
    """Run all upstream gates again on the stored tables and cache, with the current recipe.

    Raises:
        GateClosedError: At least one gate is closed; names all closed gates.
    """
    # In the UI a user can select this asset alone, and then no earlier check blocks it (FAILURES O10).
    # Training reads no dataset file, so it works without the sources.
    context = CheckContext(recipe, Tables(recipe.output_dir), sources=False, log=log)
    upstream = dict(_UPSTREAM_CHECKS)
    if recipe.has_model_captions:
        upstream["captions"] = captions
    closed = {
        f"{recipe.name}/{asset}": [finding for finding in checks.run(context) if finding.closes]
        for asset, checks in upstream.items()
    }
    closed = {asset: closed_findings for asset, closed_findings in closed.items() if closed_findings}
    if closed:
        raise closed_gates_error(closed)


def plan_run(  # noqa: PLR0913 - the last four have defaults, and no caller needs all of them
    entries: RecipeEntries,
    latents: pl.DataFrame,
    text: pl.DataFrame,
    *,
    tables: Tables | None = None,
    overrides: Mapping[str, Any] = NO_OVERRIDES,
    continue_run: str | None = None,
    log: Log,
) -> tuple[TrainingJob, Facts, pl.DataFrame]:
    """Return the run's job, the facts that its id is a hash of, and the table of trained_lora.

    `latents` and `text` are the tables of the cache stages, as they are or as they will be. `tables` have the
    rejected samples, by default the recipe's.

    Raises:
        TrainingError: A sample is incomplete, or the schedule does not fit the number of steps.
        RecipeError: A setting does not suit the base model.
        ModelError: The base model or the training adapter is missing, and cannot be downloaded.
    """
    recipe = entries.recipe
    require_supported_settings(recipe, entries.family)
    require_training_settings(recipe, entries.family)
    require_preview_prompts(recipe, entries.family)
    require_references(recipe, entries.family)
    require_trackers(recipe.training)
    training_adapter = resolve_training_adapter(recipe, log=log)

    # A sample with a rejected caption has a latent all the same.
    rejected = (tables or Tables(recipe.output_dir)).read_rejected("text_embeddings")
    latents = latents.join(rejected, on="sample_id", how="anti", maintain_order="left")
    named = training_inputs(recipe, entries, latents, text)
    recipe, inputs, facts = planned_run(entries, named, latents, log=log)
    continued = choose_continued(recipe, facts, continue_run) if continue_run is not None else None
    if continued is not None:
        _require_local_outputs(recipe)
        facts = {**facts, FACT: asdict(continued)}
    job = TrainingJob(
        recipe=recipe,
        base=entries.model_folder,
        component_folders=entries.component_folders,
        training_adapter=training_adapter,
        run=run_id(facts),
        inputs=inputs,
        empty_text=entries.text_spec(""),
        prompts=preview_prompts(recipe, entries, inputs, latents),
    )
    table = trained_table(latents, job, first_step=0 if continued is None else continued.step)
    # The provenance contains the table, and the job contains the provenance.
    record = {**provenance(recipe, entries, facts, table), "overrides": dict(overrides)}
    if continued is not None:
        record[FACT] = continued_record(recipe, continued)
    return replace(job, provenance=record), facts, table


def _require_local_outputs(recipe: Recipe) -> None:
    if outputs_of(recipe).is_remote:
        raise TrainingError(
            "a run with its outputs at an address cannot be continued after a change",
            where=f"{recipe.source}, output_dir",
            fix="set output_dir to a local folder, or begin with the weights alone: training.lora.start_from",
        )


def trained_table(latents: pl.DataFrame, job: TrainingJob, *, first_step: int = 0) -> pl.DataFrame:
    """Return the table of trained_lora: each sample, its cache entries, and how often the plan shows it.

    The plan is counted from `first_step` on, at which a run begins that continues another one.
    """
    inputs = job.inputs.table
    times_seen = np.zeros(len(inputs), dtype=np.int32)
    # The plan counts trained inputs only, in the order of the table.
    shown = job.plan().times_seen()
    if first_step:
        shown = shown - job.plan(first_step).times_seen()
    times_seen[~inputs["held_out"].to_numpy()] = shown
    caption_hashes = [" ".join(map(caption_hash, captions)) for captions in inputs["captions"]]

    # A sample with several buckets is several training inputs, which differ in bucket and latents only.
    by_sample = (
        inputs.with_columns(
            latent_keys=pl.col("latents").list.join(" "),
            text_keys=pl.col("texts").list.join(" "),
            caption_hashes=pl.Series(caption_hashes, dtype=pl.String),
            split=pl.when("held_out").then(pl.lit("validation")).otherwise(pl.lit("train")),
            times_seen=pl.Series(times_seen),
        )
        .group_by("sample_id", maintain_order=True)
        .agg(
            pl.col("bucket", "latent_keys").str.join(" "),
            pl.col("text_keys", "caption_hashes", "split").first(),
            pl.col("times_seen").sum(),
        )
    )
    references = _reference_columns(latents, job)
    samples = latents.select("sample_id", "dataset", "path", "content_hash", "height", "width")
    samples = samples.unique("sample_id", keep="first", maintain_order=True)
    table = samples.join(by_sample, on="sample_id", how="left")
    table = table.join(references, on="sample_id", how="left")
    table = table.select(*columns_in("trained_lora", table))
    return validated("trained_lora", table.sort("sample_id"), "the samples of the run")


def dataset_shares(job: TrainingJob, table: pl.DataFrame) -> list[dict[str, Any]]:
    """Return the share of training samples that each dataset's weight wants and has; [] without weights.

    `table` is from `trained_table`.
    """
    trained = set(job.inputs.trained.table["dataset"])
    weights = {
        each.name: each.weight
        for each in job.recipe.datasets
        if each.weight is not None and each.name in trained
    }
    seen = dict(table.group_by("dataset").agg(pl.col("times_seen").sum()).iter_rows())
    wanted_sum, seen_sum = sum(weights.values()), sum(seen.values())
    return [
        {"dataset": name, "wanted": weight / wanted_sum, "share": seen[name] / seen_sum}
        for name, weight in weights.items()
    ]


def share_warnings(job: TrainingJob, table: pl.DataFrame) -> list[str]:
    """Return a line for each dataset with a share of the training samples that differs from its weight."""
    return [
        f"{each['share']:.1%} of the training samples are from the dataset {each['dataset']}, but its weight "
        f"is {each['wanted']:.1%} of all weights"
        for each in dataset_shares(job, table)
        if abs(each["share"] - each["wanted"]) > MAX_SHARE_DIFFERENCE
    ]


def _reference_columns(latents: pl.DataFrame, job: TrainingJob) -> pl.DataFrame:
    inputs = job.inputs.table
    if "references" not in inputs.columns:
        return inputs.select("sample_id").unique()
    keys = inputs.select("sample_id", reference_keys="references").drop_nulls()
    # An input has a list of keys for each of its views.
    keys = keys.explode("reference_keys").explode("reference_keys")
    by_sample = keys.group_by("sample_id", maintain_order=True).agg(pl.col("reference_keys").str.join(" "))
    hashes = latents.select("sample_id", reference_hashes=REFERENCES.hashes()).unique("sample_id")
    return by_sample.join(hashes, on="sample_id", how="left")


def _finished(
    entries: RecipeEntries,
    job: TrainingJob,
    facts: Facts,
    table: pl.DataFrame,
    *,
    launch: Launch,
    log: Log,
) -> tuple[dict[str, Any], Source]:
    """Return the finished record of the run, and where its LoRA is from."""
    recipe, layout = job.recipe, RunLayout(job.folder)
    finished = repaired_run(job, facts, table, log=log)
    if finished is not None:
        return finished, "finished run"

    saved = saved_result(layout, run=job.run, steps=recipe.training.num_steps, names=lora_file_names(recipe))
    if saved is not None:
        log(f"{NOTE}run {job.run} has saved the LoRA of step {saved['steps']}: nothing is trained")
        job.write()
        saved["loss_trend"] = loss_trend(layout, saved["steps"])
        complete_run(job, table, saved)
        return saved, "checkpoint"

    action = next_action(job, facts, table)
    if FACT in facts:
        prepare_continued(layout, Continued(**facts[FACT]))
    duration = expected_duration(entries, job, action)
    about = f"about {duration_text(duration.seconds)}" if duration and action.steps_left else ""
    log(f"{NOTE}{action.text(about)}")
    result = _train(job, facts, table, difference=action.difference, launch=launch, log=log)
    record_duration(entries, job, result)
    return result, "training"


def train_part(
    entries: RecipeEntries,
    job: TrainingJob,
    facts: Facts,
    table: pl.DataFrame,
    *,
    launch: Launch,
    log: Log,
) -> None:
    """Train a run until the job's `stop_after` steps are done, or finish it; publish nothing.

    The run is the one of the complete training: it resumes from its newest checkpoint, and a later job goes
    on from this part.

    Raises:
        TrainingError: Training failed, or left no usable result.
        LaunchError: The worker died or was stopped; its last checkpoint remains.
    """
    recipe, layout = job.recipe, RunLayout(job.folder)
    with hold_run(layout, log), uploaded_run(recipe, layout, log) as run:
        remove_temp_files(layout.folder, min_age_s=OLD_S)
        uploading = run.uploading(launch)
        if job.stop_after is None:
            _finished(entries, job, facts, table, launch=uploading, log=log)
            return

        _launch(job, facts, table, launch=uploading, log=log)
        if job.stop_after not in lora_steps(layout):
            raise TrainingError(
                f"training ended without the checkpoint of step {job.stop_after}",
                where=str(layout.checkpoints),
                fix="start it again; it resumes from the last checkpoint",
            )


def _train(
    job: TrainingJob,
    facts: Facts,
    table: pl.DataFrame,
    *,
    difference: str | None,
    launch: Launch,
    log: Log,
) -> dict[str, Any]:
    layout, num_steps = RunLayout(job.folder), len(job.plan())
    launched_at_s, returned_at_s = _launch(job, facts, table, launch=launch, log=log)
    result = accept_result(layout, run=job.run, steps=num_steps, names=lora_file_names(job.recipe))
    result["difference"] = difference
    result["loss_trend"] = loss_trend(layout, num_steps)
    # Startup is all time outside the work itself: imports, loading the model, process start and exit.
    worked_s = result["ended_at_s"] - result["started_at_s"]
    result["startup_s"] = max(0.0, returned_at_s - launched_at_s - worked_s)

    complete_run(job, table, result)
    return result


def _launch(
    job: TrainingJob, facts: Facts, table: pl.DataFrame, *, launch: Launch, log: Log
) -> tuple[float, float]:
    """Launch the training of a run; return the times before and after, in seconds since the epoch."""
    layout = RunLayout(job.folder)
    write_facts(layout, facts)
    for stale in (layout.result, layout.finished):
        with suppress(FileNotFoundError):
            # A result of an earlier attempt must not be accepted if this one dies without writing its own.
            stale.unlink()

    job_file = write_job(job, table)
    log(f"starting {counted(job.recipe.accelerate.num_processes, 'training process', 'training processes')}")
    launched_at_s = time.time()
    launch(TRAINING_MODULE, job_file)
    return launched_at_s, time.time()


def _publish(job: TrainingJob, finished: dict[str, Any], *, source: Source, log: Log) -> int:
    """Publish the run's LoRA to `lora/` and return its step."""
    recipe, layout = job.recipe, RunLayout(job.folder)

    # If nothing has changed, the step that a person or the last evaluation chose stays.
    exported = exported_step(recipe.output_dir, job.run) if source == "finished run" else None
    if exported is None or (exported.automatic and not recipe.publishes_best):
        if replaced_step := forget_exported_step(recipe.output_dir):
            log(f"lora/ held step {replaced_step[1]} of run {replaced_step[0]}, which this run replaces")
        names = publish(layout, recipe.output_dir / LORA_FOLDER, finished)
        log(f"lora/ holds run {job.run}: " + (f"wrote {', '.join(names)}" if names else "unchanged"))
        return finished["steps"]

    names = publish_step(recipe.output_dir, exported)
    chosen = "chosen by its evaluation" if exported.automatic else "as exported"
    change = f"wrote {', '.join(names)}" if names else "unchanged"
    log(
        f"lora/ holds step {exported.step} of run {job.run}, {chosen}: {change}; "
        f"latentline export {recipe.name} --latest publishes the last step"
    )
    return exported.step


def _report(job: TrainingJob, finished: dict[str, Any], *, source: Source) -> Report:
    layout = RunLayout(job.folder)
    metrics = read_metrics(layout.metrics, len(job.plan()))
    validation = read_metrics(layout.validation, len(job.plan()) + 1)
    losses = [line["loss"] for line in metrics]
    # Losses of single steps are noisy, so the report compares means of a tenth of the run.
    tenth = max(1, len(losses) // 10)
    # Rounded up, so that the curve has at most CURVE_POINTS points.
    stride = max(1, -(-len(metrics) // CURVE_POINTS))

    return {
        "samples": len(job.inputs),
        "held_out": len(job.inputs.held_out),
        "run": job.run,
        "launched": source == "training",
        "from_checkpoint": source == "checkpoint",
        "difference": finished.get("difference") if source == "training" else None,
        "steps": finished["steps"],
        "resumed_from": finished["resumed_from"],
        "first_loss": _mean(losses[:tenth]),
        "last_loss": _mean(losses[-tenth:]),
        "loss_curve": [[line["step"], line["loss"]] for line in metrics[::stride]],
        "first_validation_loss": validation[0]["loss"] if validation else None,
        "last_validation_loss": validation[-1]["loss"] if validation else None,
        "first_validation_gap": validation[0].get("gap") if validation else None,
        "last_validation_gap": validation[-1].get("gap") if validation else None,
        "hardest_samples": hardest_samples(layout),
        "noise_below_half": share_below_half(
            layout, len(job.plan()), num_timesteps=detect(job.base).num_timesteps
        ),
        "last_learning_rate": metrics[-1]["learning_rate"] if metrics else None,
        "num_weights": finished["num_weights"],
        "model_revision": snapshot_commit(job.base),
        "device": finished["device"],
        # Runs of 0.3.0 and earlier lack these three.
        "gpu": finished.get("gpu"),
        "node": finished.get("node"),
        "scheduler_job": finished.get("scheduler_job"),
        # Of optimizer steps, also of interrupted processes; not of start-up, previews and validation.
        "node_hours": round(
            sum(line.get("seconds", 0.0) for line in metrics) * finished.get("num_nodes", 1) / 3600, 4
        ),
        "offload": finished.get("offload", "none"),
        # Runs of 0.3.0 and earlier lack it, and their recipes have no auto.
        "compile": finished.get("compile", job.recipe.training.compile),
        "peak_memory_bytes": finished["peak_memory_bytes"],
        "warnings": finished["warnings"],
        "files": {item["name"]: item["bytes"] for item in finished["files"]},
        "plan": job.plan().numbers(),
        "settings": _settings(job.recipe),
    }


def _settings(recipe: Recipe) -> dict[str, int | float | None]:
    """Return the settings by which runs of one recipe differ most often, with the overrides of this one."""
    training = recipe.training
    return {
        **recipe_values(recipe),
        "batch_size": training.batch_size,
        "gradient_accumulation": training.gradient_accumulation,
    }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
