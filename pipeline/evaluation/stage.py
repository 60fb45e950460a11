"""Stage evaluation: draw pictures with each step of a run, score them, and choose a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.encoding.fill import EntryRequests, FillResult, fill
from pipeline.errors import counted
from pipeline.evaluation.choice import choose
from pipeline.evaluation.feature_entries import (
    IMAGE,
    PICTURE,
    TEXT,
    feature_requests,
    feature_table,
    read_features,
)
from pipeline.evaluation.features import References, ScorerFeatures
from pipeline.evaluation.known_entries import entry_rows, read_known, write_known
from pipeline.evaluation.numbers import Measured, measure
from pipeline.evaluation.pictures import picture_requests, picture_table
from pipeline.evaluation.prepare import Evaluation, Request, prepare_evaluation
from pipeline.evaluation.publishing import publish_choice
from pipeline.evaluation.references import reference_images
from pipeline.evaluation.report import write_pictures
from pipeline.evaluation.scorers import resolve_scorers
from pipeline.log import Log
from pipeline.reporting.reports import StageResult, Stopwatch
from pipeline.storage.tables import SCHEMAS, Tables, empty, row_names, validated

if TYPE_CHECKING:
    from pipeline.processes.launch import Launch
    from pipeline.recipe import Recipe

ASSET = "evaluation"


def evaluate(recipe: Recipe, request: Request, tables: Tables, *, launch: Launch, log: Log) -> StageResult:
    """Evaluate the steps of a run, and write pictures of the result into its folder.

    Only pictures and features that are not in the cache are computed; nothing is launched if none is missing.

    Raises:
        DrawingError: The run or a step does not exist, a LoRA does not fit the base model, or memory ran out.
        EvaluationError: The prompts cannot be chosen, or a scorer cannot be used.
        ModelError: A model cannot be found or loaded.
        RecipeError: A prompt does not suit the base model.
        StoreError: The cache cannot be read or written.
        TrainingError: No run has a LoRA, or the chosen step cannot be published.
    """
    watch = Stopwatch()
    evaluation = prepare_evaluation(recipe, request, log=log)
    fills = _Fills(evaluation, launch, log, watch)
    scored = _score(evaluation, tables, fills, log)
    # The entries of the recipe's own prompts stay known next to those of a prompt set.
    fills.remember(keep_known=request.prompt_set is not None)
    pictures, measured = scored.pictures, scored.measured
    choice = choose(measured, evaluation.settings.limits.model_dump())
    write_pictures(evaluation, pictures, measured, choice)
    published = dict[str, Any]()
    if recipe.publishes_best and request.is_default:
        # Before the report: a job that dies in between publishes the same step again.
        step, text = publish_choice(recipe, evaluation.run, choice, log=log)
        published = {"published_step": step, "published": text}

    table = measured.scores.with_columns(run=pl.lit(evaluation.run))
    table = table.select(pl.col(name).cast(kind) for name, kind in SCHEMAS[ASSET].items())
    table = validated(ASSET, table, "result of evaluation").sort(row_names(ASSET))
    report = {
        "run": evaluation.run,
        "chosen_step": choice.step,
        "decided": choice.decided,
        "why": choice.why,
        "best_step": choice.best,
        **published,
        "steps": [each.as_json() for each in measured.steps],
        "by_scorer": {name: [each.as_json() for each in steps] for name, steps in measured.by_scorer.items()},
        "absent": dict(measured.absent),
        "bleeding": [each.as_json() for each in measured.bleeding],
        "limits": evaluation.settings.limits.model_dump(),
        "samples": len(scored.images),
        "pictures": len(pictures),
        **_counts("pictures", scored.drawn),
        **_counts("features", scored.computed),
        **watch.numbers(),
    }
    return StageResult(table, empty("rejected"), report)


@dataclass(frozen=True)
class Scored:
    """The pictures of an evaluation and their numbers.

    Attributes:
        pictures: Rows of `pictures.picture_table`.
        images: Rows of `references.reference_images`.
        drawn: Pictures in the cache.
        computed: Features in the cache.
    """

    pictures: pl.DataFrame
    images: pl.DataFrame
    drawn: FillResult
    computed: FillResult
    measured: Measured


def score_pictures(
    evaluation: Evaluation, tables: Tables, *, launch: Launch, log: Log, watch: Stopwatch
) -> Scored:
    """Draw and score the pictures of an evaluation that are not in the cache; write no table and no report.

    Raises:
        LatentlineError: As `evaluate`.
    """
    return _score(evaluation, tables, _Fills(evaluation, launch, log, watch), log)


def _score(evaluation: Evaluation, tables: Tables, fills: _Fills, log: Log) -> Scored:
    entries = evaluation.entries
    # Before the first picture, so that a scorer with a mistake costs no drawing.
    scorers = resolve_scorers(entries, evaluation.settings.scorers)
    log(summary(evaluation))
    pictures = picture_table(evaluation)
    images = reference_images(evaluation, tables)
    features = feature_table(evaluation, scorers, pictures, images)
    drawn = fills.fill(picture_requests(evaluation, pictures, fills.known))
    settings = {
        "background": list(entries.recipe.latents.background),
        "max_file_bytes": evaluation.recipe.checks.max_file_bytes,
    }
    computed = fills.fill(feature_requests(scorers, features, fills.known, settings=settings))

    _warn(features, computed, log)
    usable = features.filter(~pl.col("key").is_in(list(computed.failed)))
    by_scorer = [
        _scorer_features(entries, scorer.name, usable.filter(scorer=index), pictures, images)
        for index, scorer in enumerate(scorers)
    ]
    return Scored(pictures, images, drawn, computed, measure(by_scorer))


def _warn(features: pl.DataFrame, computed: FillResult, log: Log) -> None:
    """Log the images that could not be read, which are missing from the comparison."""
    names = features.filter(pl.col("key").is_in(list(computed.failed)))["of"].unique(maintain_order=True)
    if not names.is_empty():
        first = next(iter(computed.failed.values()))
        number = counted(len(names), "image is", "images are")
        log(f"warning: {number} missing from the comparison, such as {names[0]}: {first.detail}")


@dataclass
class _Fills:
    """Fills the cache of an evaluation, and remembers what it holds then."""

    evaluation: Evaluation
    launch: Launch
    log: Log
    watch: Stopwatch

    def __post_init__(self) -> None:
        self.known = read_known(self.evaluation.recipe.output_dir)
        self._rows: list[pl.DataFrame] = []

    def fill(self, requests: EntryRequests) -> FillResult:
        """Compute the missing entries."""
        entries = self.evaluation.entries
        result = fill(entries, requests, launch=self.launch, log=self.log, watch=self.watch)
        self._rows.append(entry_rows(requests, result))
        return result

    def remember(self, *, keep_known: bool) -> None:
        """Record the stats of all entries for the next evaluation, also of those known before if wanted."""
        known = [self.known] if keep_known else []
        write_known(self.evaluation.recipe.output_dir, [*self._rows, *known])


def _counts(kind: str, result: FillResult) -> dict[str, int]:
    counters = result.counters(0)
    return {f"{kind}_{name}": counters[name] for name in ("encoded", "reused", "failed")}


def _scorer_features(
    entries: RecipeEntries, name: str, features: pl.DataFrame, pictures: pl.DataFrame, images: pl.DataFrame
) -> ScorerFeatures:
    def of(kind: str) -> dict[str, Any]:
        rows = features.filter(kind=kind)
        return dict(zip(rows["of"], read_features(entries.store, rows["key"]), strict=True))

    # Two prompts may be equal and share a picture, so the features have one row per picture.
    drawn = features.filter(kind=PICTURE)
    row_of = {key: row for row, key in enumerate(drawn["of"])}
    numbered = pictures.with_columns(
        row=pl.col("key").replace_strict(row_of, return_dtype=pl.Int64), picture=pl.col("key")
    )
    by_image, texts = of(IMAGE), of(TEXT)
    return ScorerFeatures(
        scorer=name,
        pictures=numbered.select("step", "strength", "prompt", "role", "concept", "seed", "row", "picture"),
        features=read_features(entries.store, drawn["key"]),
        texts=texts or None,
        held_out=_references(images.filter("held_out"), by_image),
        training=_references(images.filter(~pl.col("held_out")), by_image),
    )


def _references(images: pl.DataFrame, features: dict[str, Any]) -> References:
    usable = images.filter(pl.col("sample_id").is_in(list(features)))
    rows = [features[name] for name in usable["sample_id"]]
    width = len(next(iter(features.values()))) if features else 0
    return References(
        concepts=usable["concept"].to_list(),
        names=usable["sample_id"].to_list(),
        captions=usable["caption"].to_list(),
        groups=usable["duplicate_group"].to_list(),
        features=np.stack(rows) if rows else np.zeros((0, width), np.float32),
    )


def summary(evaluation: Evaluation) -> str:
    """Return what is evaluated, in one line."""
    roles = [each.role for each in evaluation.prompts]
    prompts = ", ".join(f"{roles.count(role)} {role}" for role in dict.fromkeys(roles))
    steps = counted(len(evaluation.steps), "step")
    return (
        f"evaluating run {evaluation.run}: {steps}, {counted(len(roles), 'prompt')} ({prompts}), "
        f"{counted(evaluation.num_pictures, 'picture')}"
    )
