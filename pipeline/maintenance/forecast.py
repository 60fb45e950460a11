"""Forecast of a recipe's next job: failing checks, what it would encode, what it would train, and why.

The forecast calls the functions that the job calls: scan, validation, geometry, keys and store. It writes
only `fingerprints.json`, the hashes of the model's files, so that gigabytes are hashed once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import polars as pl

from pipeline.aspect_buckets import checks as aspect_buckets
from pipeline.aspect_buckets.stage import assign_buckets
from pipeline.cache.recipe_entries import SEEN, TARGET, RecipeEntries, with_recorded
from pipeline.cache.store import EntrySpec
from pipeline.errors import PathIsolationError
from pipeline.log import Log, discard
from pipeline.maintenance.caption_forecast import forecast_captions, with_pending
from pipeline.maintenance.diagnosis_forecast import DiagnosisForecast, forecast_diagnosis
from pipeline.maintenance.expected import (
    DAMAGED,
    GEOMETRY,
    MISSING,
    Expected,
    Row,
    changed_inputs,
    estimate_seconds,
    expect_side_input,
    unusable_entries,
)
from pipeline.maintenance.picture_forecast import PictureForecast, forecast_pictures
from pipeline.maintenance.sweep_forecast import SweepForecast, forecast_sweep
from pipeline.maintenance.training_forecast import TrainingForecast, forecast_training
from pipeline.models.recipe_support import (
    require_preview_prompts,
    require_references,
    require_training_settings,
)
from pipeline.models.resolve import check_local_base
from pipeline.models.training_adapter import check_training_adapter
from pipeline.raw_images import checks as raw_images
from pipeline.raw_images.commits import COMMITS, with_commits
from pipeline.raw_images.stage import scan
from pipeline.raw_images.walk import require_folders
from pipeline.recipe.check_specs import PATH_ISOLATION
from pipeline.recipe.isolation import require_isolation
from pipeline.reporting.findings import CheckContext, Finding
from pipeline.side_inputs import MASKS, REFERENCES, SIDE_INPUTS
from pipeline.side_inputs.masks import MEAN
from pipeline.side_inputs.references import IMAGES
from pipeline.storage.tables import Tables, selected
from pipeline.text_embeddings.caption_rows import text_rows
from pipeline.text_embeddings.checks import caption_warnings
from pipeline.text_embeddings.stage import needed_texts
from pipeline.trained_lora.context_file import require_context_file
from pipeline.trained_lora.start_file import require_start_file
from pipeline.trained_lora.supported_settings import require_supported_settings
from pipeline.vae_latents.checks import cropped_masks
from pipeline.vae_latents.side_inputs import without_refused
from pipeline.validated_dataset import checks as validated_dataset
from pipeline.validated_dataset.stage import validate

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.recipe import Recipe
    from pipeline.reporting.reports import StageResult

NEW, CHANGED = "new image", "image changed"
NEW_CAPTION, CAPTION_CHANGED, NOT_WRITTEN = "new caption", "caption changed", "caption not written yet"

_GEOMETRY_COLUMNS = ("resized_height", "resized_width", "crop_top", "crop_left", *TARGET)

_CHECKS = {
    "raw_images": raw_images.run,
    "validated_dataset": validated_dataset.run,
    "aspect_buckets": aspect_buckets.run,
}
"""Checks of the stages before the caches, in the order of the graph."""


class FailedCheck(NamedTuple):
    """A check of an asset that would fail, with the measured numbers and suggested fixes."""

    asset: str
    name: str
    summary: str
    fix: str


@dataclass(frozen=True)
class Forecast:
    """Forecast of a recipe's next job. The attributes are keys of `latentline plan --json`.

    Attributes:
        samples: Number of samples that the job would keep.
        rejected: Number of samples that it would reject, by reason.
        gone: Samples of the previous tables that no longer exist.
        closed: Gates that would stop the job before anything is encoded. If one of them is `path_isolation`,
            nothing else was examined.
        latents: Work on latents.
        text: Work on text embeddings.
        side_inputs: Work on each side input that the recipe uses, such as "masks".
        warnings: Warnings that the job would show.
        unknown_lengths: Number of captions with a length in tokens that only the cache job can find out.
        training: None if a gate would close.
        diagnosis: Captions that the diagnosis would measure; None for a recipe without one.
        evaluation: Pictures of the evaluation after training; None for a recipe without one.
        captions: Captions that a model would write; None for a recipe without them.
        pending_captions: Number of samples with a caption that the model has not written yet. These captions
            are not checked, each counts as one text to encode unless the image has a person's caption too,
            and the id of the run is unknown.
        sweep: Training of the sweep after the recipe's own; None for a recipe without one.
    """

    samples: int
    rejected: Mapping[str, int]
    gone: Sequence[str]
    closed: Sequence[FailedCheck]
    latents: Expected
    text: Expected
    side_inputs: Mapping[str, Expected] = field(default_factory=dict[str, Expected])
    warnings: Sequence[FailedCheck] = ()
    unknown_lengths: int = 0
    training: TrainingForecast | None = None
    diagnosis: DiagnosisForecast | None = None
    evaluation: PictureForecast | None = None
    captions: Expected | None = None
    pending_captions: int = 0
    sweep: SweepForecast | None = None


def forecast(recipe: Recipe, tables: Tables, *, continue_run: str | None = None, log: Log) -> Forecast:
    """Return the forecast of the job `<recipe>_train` for the current files and recipe.

    `continue_run` is a run that the job would continue, or "latest".

    Raises:
        DatasetError: A dataset's folder is missing or cannot be listed.
        ModelError: The base model cannot be found.
        StoreError: The cache cannot be read.
        RecipeError: A preview prompt does not suit the base model.
        TrainingError: The LoRA in `start_from` cannot be used, or the schedule does not fit the steps.
    """
    try:
        require_isolation(recipe)
    except PathIsolationError as err:
        paths = ", ".join(err.where.splitlines())
        gate = FailedCheck("raw_images", PATH_ISOLATION.name, f"{err.what} ({paths})", err.fix)
        return Forecast(0, {}, [], [gate], Expected("latents"), Expected("text"))

    # Before the scan, which takes minutes for a large dataset.
    check_local_base(recipe)
    check_training_adapter(recipe)
    for dataset in recipe.datasets:
        require_folders(dataset, packed=recipe.packed.get(dataset.name))
    require_preview_prompts(recipe)
    require_references(recipe)
    require_training_settings(recipe)
    require_supported_settings(recipe)
    require_start_file(recipe)
    require_context_file(recipe)

    # A forecast leaves the output folder as it is, also the indexes of the files that it reads.
    raw = scan(recipe, tables, log=log, remember=False)
    recipe = with_commits(recipe, raw.report[COMMITS])
    entries = RecipeEntries(recipe, log=log)
    captioned = forecast_captions(entries, tables, raw.table)
    written = captioned and captioned.table
    valid = validate(recipe, raw.table, tables, log=log, written=written, remember=False)
    pending = captioned.pending if captioned is not None else {}
    valid = replace(valid, table=with_pending(valid.table, pending))
    buckets = assign_buckets(recipe, valid.table, log=discard)
    results = {"raw_images": raw, "validated_dataset": valid, "aspect_buckets": buckets}

    known_latents = tables.read_previous("vae_latents")
    known_text = tables.read_previous("text_embeddings")
    earlier_ids: set[str] = set() if known_latents is None else set(known_latents["sample_id"])
    requests, refused = without_refused(entries, entries.latent_requests(buckets.table))
    reasons = [reason for each in results.values() for reason in each.rejected["reason"]]
    reasons += [each["reason"] for each in refused]
    closed, warnings = failing_checks(recipe, results)
    captions = text_rows(entries, valid.table)
    lengths = _with_lengths(entries, captions, known_text)
    warnings += _cache_warnings(entries, requests, known_latents, lengths)
    num_pending = int(valid.table["sample_id"].is_in(list(pending)).sum())
    training = None if closed else forecast_training(entries, requests, captions, continue_run=continue_run)
    if training is not None and num_pending:
        training = replace(training, action=replace(training.action, run="", reason="", difference=None))
    return Forecast(
        samples=requests["sample_id"].n_unique(),
        rejected=dict(Counter(reasons)),
        gone=sorted(earlier_ids - set(buckets.table["sample_id"])),
        closed=closed,
        latents=_expect_latents(entries, requests, known_latents),
        text=_expect_text(entries, captions, known_text, pending=set(pending.values())),
        side_inputs={
            side_input.plural: expect_side_input(entries, side_input, requests, known_latents)
            for side_input in SIDE_INPUTS
            if side_input.numbers(recipe)
        },
        warnings=warnings,
        unknown_lengths=lengths["num_cut"].null_count(),
        training=training,
        diagnosis=None if closed else forecast_diagnosis(entries, tables, requests, captions),
        evaluation=forecast_pictures(entries, valid.table, training and training.action),
        captions=captioned and captioned.expected,
        pending_captions=num_pending,
        sweep=forecast_sweep(recipe, training),
    )


def failing_checks(
    recipe: Recipe, results: Mapping[str, StageResult]
) -> tuple[list[FailedCheck], list[FailedCheck]]:
    """Return the gates that would stop the job, all of the first asset with any, and the warnings until then.

    `results` holds the results of the stages before the caches, by asset.
    """
    reports = {asset: result.report for asset, result in results.items()}
    context = CheckContext(recipe, _ForecastTables(recipe.output_dir, results), reports)
    warnings: list[FailedCheck] = []
    for asset, run_checks in _CHECKS.items():
        failed = [finding for finding in run_checks(context) if not finding.passed]
        warnings += [_failed(asset, finding) for finding in failed if not finding.closes]
        if closed := [_failed(asset, finding) for finding in failed if finding.closes]:
            return closed, warnings
    return [], warnings


def _failed(asset: str, finding: Finding) -> FailedCheck:
    return FailedCheck(asset, finding.name, finding.summary, finding.fix)


def _with_lengths(entries: RecipeEntries, captions: pl.DataFrame, known: pl.DataFrame | None) -> pl.DataFrame:
    """Add the lengths in tokens that an earlier run recorded, null for captions that it did not encode."""
    keys = entries.text_keys(captions["caption"], captions.get_column(SEEN, default=None))
    counts = {"num_tokens": pl.Int32, "num_cut": pl.Int32}
    return with_recorded(captions.with_columns(keys.alias("key")), known, counts)


def _cache_warnings(
    entries: RecipeEntries, requests: pl.DataFrame, known: pl.DataFrame | None, lengths: pl.DataFrame
) -> list[FailedCheck]:
    """Return the warnings of the cache stages, as far as the entries that they depend on exist."""
    # The weight of a mask inside its crop is recorded with its entry.
    masks = MASKS.entry_rows(entries, requests).select("row", mask_key="key")
    recorded = MASKS.recorded(known).select("key", MEAN).unique("key", keep="first")
    masks = masks.join(recorded, left_on="mask_key", right_on="key", how="inner")
    masked = requests.with_row_index("row").join(masks, on="row", how="inner", maintain_order="left")
    outcomes = {
        "vae_latents": {"masks_cropped": cropped_masks(entries.recipe, masked)},
        "text_embeddings": caption_warnings(entries, lengths),
    }
    return [
        FailedCheck(asset, name, outcome.summary, outcome.fix)
        for asset, of_asset in outcomes.items()
        for name, outcome in of_asset.items()
        if not outcome.passed
    ]


class _ForecastTables(Tables):
    """Tables as the job would write them, held in memory."""

    def __init__(self, output_dir: Path, results: Mapping[str, StageResult]) -> None:
        super().__init__(output_dir)
        self._results = results

    def read(self, asset: str, columns: Iterable[str] | None = None) -> pl.DataFrame:
        return selected(asset, self._results[asset].table, columns)

    def read_rejected(self, stage: str | None = None) -> pl.DataFrame:
        stages = self._results if stage is None else [stage]
        return pl.concat([self._results[each].rejected for each in stages])


def _expect_latents(entries: RecipeEntries, requests: pl.DataFrame, known: pl.DataFrame | None) -> Expected:
    # If the bucket changed, the sample's earlier row in any bucket explains why its latent is encoded.
    known_rows = [] if known is None else known.to_dicts()
    in_any_bucket = {(row["sample_id"], row["flipped"]): row for row in known_rows}
    in_same_bucket = {(row["sample_id"], row["bucket"], row["flipped"]): row for row in known_rows}

    expected, num_pixels = Expected("latents"), 0

    # One row per sample, bucket and mirroring; rows with equal pixels share an entry.
    unique_requests = requests.unique("key", keep="first", maintain_order=True)
    for row, spec, status in unusable_entries(
        entries, expected, unique_requests, known, spec_of=entries.latent_spec
    ):
        sample_id, bucket, mirrored = row["sample_id"], row["bucket"], row["flipped"]
        earlier = in_same_bucket.get((sample_id, bucket, mirrored)) or in_any_bucket.get(
            (sample_id, mirrored)
        )
        reason = DAMAGED if status == "wrong" else _latent_reason(entries, row, spec, earlier)
        expected.add(reason, f"{sample_id}, mirrored" if mirrored else sample_id, spec.file_bytes)
        num_pixels += row["target_height"] * row["target_width"]
    estimate_seconds(entries, expected, cost=num_pixels)
    return expected


def _expect_text(
    entries: RecipeEntries, rows: pl.DataFrame, known: pl.DataFrame | None, *, pending: Collection[str]
) -> Expected:
    images = [SEEN, IMAGES] if SEEN in rows.columns else []
    names = ["caption", *images[:1]]
    captions = rows.select("caption", *images, "sample_id", "variant")
    captions = captions.unique(names, keep="first", maintain_order=True)
    texts = needed_texts(entries, rows)
    requests = entries.text_requests(texts["caption"], known, images=texts.get_column(SEEN, default=None))
    requests = requests.join(captions, on=names, how="left", nulls_equal=True, maintain_order="left")
    known_rows = [] if known is None else known.to_dicts()
    earlier_rows = {(row["sample_id"], row["variant"]): row for row in known_rows}

    expected = Expected("text")
    for row, spec, status in unusable_entries(
        entries,
        expected,
        requests,
        known,
        spec_of=lambda row: entries.text_spec(row["caption"], images=row.get(SEEN)),
    ):
        caption, sample_id = row["caption"], row["sample_id"]
        earlier = earlier_rows.get((sample_id, row["variant"]))
        reason = DAMAGED if status == "wrong" else _text_reason(entries, row, spec, earlier)
        reason = NOT_WRITTEN if caption in pending else reason
        # Captions without a sample are the empty one and the preview prompts.
        name = f"the preview prompt {caption!r}" if caption else "the empty caption"
        expected.add(reason, sample_id or name, row["about_bytes"])
    estimate_seconds(entries, expected, cost=expected.to_make)
    return expected


def _latent_reason(entries: RecipeEntries, row: Row, spec: EntrySpec, earlier: Row | None) -> str:
    if earlier is None:
        return NEW
    if earlier["content_hash"] != row["content_hash"]:
        return CHANGED
    if earlier["key"] == spec.key:
        return MISSING
    if any(earlier[name] != row[name] for name in _GEOMETRY_COLUMNS):
        return GEOMETRY
    return changed_inputs(entries, spec, earlier["key"], vars(entries.latent_inputs(row)))


def _text_reason(entries: RecipeEntries, row: Row, spec: EntrySpec, earlier: Row | None) -> str:
    caption = row["caption"]
    if earlier is None:
        return NEW_CAPTION
    if earlier["caption"] != caption:
        return CAPTION_CHANGED
    if earlier["key"] == spec.key:
        return MISSING
    if _reference_hashes(earlier) != _reference_hashes(row):
        return f"{REFERENCES.name} changed"
    inputs = entries.text_inputs(caption, row.get(SEEN)).values()
    return changed_inputs(entries, spec, earlier["key"], inputs)


def _reference_hashes(row: Row) -> list[str]:
    return [image["hash"] for image in json.loads(row.get(IMAGES) or "[]")]
