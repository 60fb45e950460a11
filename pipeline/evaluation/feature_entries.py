"""Features of pictures, dataset images and texts as cache entries: their keys, jobs and values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import polars as pl

from pipeline.cache.entry_format import FEATURES
from pipeline.cache.keys import preprocessing_of
from pipeline.cache.recipe_entries import STAT_COLUMNS, STATS, TARGET, with_recorded
from pipeline.cache.store import EntrySpec, Store, TensorSpec
from pipeline.encoding.fill import EntryRequests, Row
from pipeline.encoding.jobs import Job
from pipeline.evaluation.prepare import Evaluation
from pipeline.evaluation.scorers import Features, ResolvedScorer
from pipeline.models.fingerprints import canonical_hash

SCORERS = "scorers"
"""Key of the scorers in the settings of an encoding of features."""

MAX_FEATURES = 65_536
"""Maximum number of features of a scorer."""

PICTURE, IMAGE, TEXT = "picture", "image", "text"
"""What features are computed of: a drawn picture, an image of a dataset, or a text."""

GEOMETRY_COLUMNS = (
    "height",
    "width",
    "resized_height",
    "resized_width",
    "crop_top",
    "crop_left",
    *TARGET,
)
"""Columns from which `Geometry.from_row` reads how an image is cropped."""

COLUMNS: dict[str, Any] = {
    "scorer": pl.Int64,
    "kind": pl.String,
    "of": pl.String,
    "key": pl.String,
    "name": pl.String,
    "work": pl.String,
    "cost": pl.Int64,
}
"""Columns of the table of features, one row per scorer and picture, image or text.

`scorer` is the index of the scorer. `of` is the picture's key, the image's sample_id or the text. `work` is
what the worker needs besides, as JSON.
"""


def feature_table(
    evaluation: Evaluation, scorers: Sequence[ResolvedScorer], pictures: pl.DataFrame, images: pl.DataFrame
) -> pl.DataFrame:
    """Return one row per scorer and distinct picture, image and text.

    Args:
        evaluation: The evaluation.
        scorers: Its scorers.
        pictures: Rows of `pictures.picture_table`.
        images: Rows of vae_latents, see `references.reference_images`.
    """
    distinct = pictures.unique("key", keep="first", maintain_order=True)
    rows: list[tuple[Any, ...]] = []
    for index, scorer in enumerate(scorers):

        def add(
            kind: str, of: str, inputs: Any, name: str, work: Any, scorer: ResolvedScorer = scorer
        ) -> None:
            key = canonical_hash({"features": {"scorer": scorer.fingerprint, kind: inputs}})
            rows.append((index, kind, of, key, f"{name}, {scorer.name}", json.dumps(work), 1))  # noqa: B023 - called in this iteration

        for row in distinct.iter_rows(named=True):
            work = {"key": row["key"], "height": row["height"], "width": row["width"]}
            add(PICTURE, row["key"], row["key"], f"the picture of {row['prompt'][:60]!r}", work)
        for row in images.iter_rows(named=True):
            inputs, work = _image_inputs(evaluation, row)
            add(IMAGE, row["sample_id"], inputs, row["sample_id"], work)
        if scorer.reads_texts:
            for text in pictures["prompt"].unique(maintain_order=True):
                add(TEXT, text, text, f"the prompt {text[:60]!r}", {"text": text})
    return pl.DataFrame(rows, schema=COLUMNS, orient="row")


def feature_requests(
    scorers: Sequence[ResolvedScorer],
    rows: pl.DataFrame,
    previous: pl.DataFrame | None,
    *,
    settings: dict[str, Any],
) -> EntryRequests:
    """Return the requests of all features; `previous` has the recorded stats of entries by key."""
    rows = rows.unique("key", keep="first", maintain_order=True)
    size = pl.col(STAT_COLUMNS[0])

    # Only a scorer knows the number of its features, so the size of a new entry is an estimate.
    about = feature_spec("").file_bytes // 16
    rows = with_recorded(rows, previous, STATS)
    rows = rows.with_columns(num_bytes=size, about_bytes=pl.coalesce(size, pl.lit(about, pl.Int64)))
    return EntryRequests(
        kind="features",
        rows=rows,
        settings={SCORERS: [asdict(each) for each in scorers], **settings},
        spec=lambda row: feature_spec(row["key"]),
        job=_job,
        facts={},
    )


def feature_spec(key: str) -> EntrySpec:
    """Return the entry of features, whose number only its header states."""
    return EntrySpec("features", key, {FEATURES: TensorSpec("float32", (MAX_FEATURES,), ragged=True)})


def read_features(store: Store, keys: Iterable[str]) -> Features:
    """Return the features of the entries in the order of the keys, as float32 (N, D); (0, 0) without keys.

    Raises:
        StoreError: An entry is missing or damaged.
    """
    # A flipped bit would change numbers of the report.
    values = [store.read(feature_spec(key), verify=True)[FEATURES] for key in keys]
    return np.stack(values) if values else np.zeros((0, 0), np.float32)


def _job(row: Row) -> Job:
    work = {"scorer": row["scorer"], "kind": row["kind"], **json.loads(row["work"])}
    return Job(feature_spec(row["key"]), {"of": row["kind"]}, work, row["name"], row["cost"])


def _image_inputs(evaluation: Evaluation, row: Row) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the inputs of the key of an image's features, and the worker's input."""
    geometry = {name: row[name] for name in GEOMETRY_COLUMNS}
    inputs = {
        "content_hash": row["content_hash"],
        "geometry": geometry,
        "background": list(evaluation.entries.recipe.latents.background),
        "preprocessing": preprocessing_of(row.get("decoding")),
    }
    work = {"root": row["root"], "path": row["path"], "content_hash": row["content_hash"], **geometry}
    return inputs, work
