"""The captions that a model would write in the next job."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import polars as pl

from pipeline.captions.entries import caption_requests, caption_spec, read_caption, stated_inputs, with_keys
from pipeline.captions.model import resolve_model
from pipeline.captions.stage import ASSET, by_request, images_to_caption
from pipeline.maintenance.expected import (
    DAMAGED,
    MISSING,
    Expected,
    changed_inputs,
    estimate_seconds,
    unusable_entries,
)
from pipeline.storage.tables import SCHEMAS, empty
from pipeline.validated_dataset.captions import MODEL, PENDING, canonical

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.cache.recipe_entries import RecipeEntries
    from pipeline.storage.tables import Tables

_PENDING_TEXT = "(caption {:09} is not written yet)"
"""Text in place of a caption that only the job can write, with the caption's number."""


class CaptionForecast(NamedTuple):
    """Captions of a model in the next job.

    Attributes:
        expected: Captions to write.
        table: The table captions as the job would write it, with a text in place of each pending caption.
        pending: That text by sample id, for samples with a caption that is not written yet.
    """

    expected: Expected
    table: pl.DataFrame
    pending: dict[str, str]


def forecast_captions(entries: RecipeEntries, tables: Tables, raw: pl.DataFrame) -> CaptionForecast | None:
    """Return the captions that the next job would write; None for recipes without a captioning model.

    Raises:
        ModelError: A captioning model cannot be found.
    """
    recipe = entries.recipe
    if not recipe.has_model_captions:
        return None
    known = tables.read_previous(ASSET)
    texts = {} if known is None else dict(known.select("key", "caption").iter_rows())
    earlier = {} if known is None else {row["sample_id"]: row for row in known.iter_rows(named=True)}

    expected, parts, cost = Expected("captions"), [empty(ASSET)], 0
    pending: dict[str, str] = {}
    for settings, images in by_request(recipe, images_to_caption(recipe, raw, log=entries.log)):
        model = resolve_model(entries, settings)
        requests = caption_requests(entries, model, settings, images, known).rows
        to_write: set[str] = set()
        for row, spec, status in unusable_entries(
            entries, expected, requests, known, spec_of=lambda row: caption_spec(row["key"])
        ):
            to_write.add(row["key"])
            before = earlier.get(row["sample_id"])
            if status == "wrong":
                reason = DAMAGED
            elif before is None:
                reason = "new image"
            elif before["content_hash"] != row["content_hash"]:
                reason = "image changed"
            elif before["key"] == row["key"]:
                reason = MISSING
            else:
                inputs = stated_inputs(entries, model, settings, row)
                reason = changed_inputs(entries, spec, before["key"], inputs)
            expected.add(reason, row["sample_id"], row["about_bytes"])
            cost += row["cost"]

        rows = with_keys(entries, model, settings, images)
        present = set(rows["key"]) - to_write
        texts |= {key: canonical(read_caption(entries.store, key)) for key in sorted(present - texts.keys())}
        # By key: a damaged entry gets its former caption again, and copies of an image get one caption.
        unknown = to_write - texts.keys()
        for key in filter(unknown.__contains__, rows["key"]):
            texts.setdefault(key, _PENDING_TEXT.format(len(texts)))
        captions = [texts[key] for key in rows["key"]]
        of_samples = zip(rows["sample_id"], rows["key"], strict=True)
        pending |= {sample_id: texts[key] for sample_id, key in of_samples if key in unknown}
        nothing = {name: kind for name, kind in SCHEMAS[ASSET].items() if name not in rows.columns}
        rows = rows.with_columns(pl.lit(None, kind).alias(name) for name, kind in nothing.items())
        parts.append(rows.with_columns(caption=pl.Series(captions, dtype=pl.String)).select(*SCHEMAS[ASSET]))
    estimate_seconds(entries, expected, cost=cost)
    return CaptionForecast(expected, pl.concat(parts), pending)


def with_pending(validated: pl.DataFrame, pending: Mapping[str, str]) -> pl.DataFrame:
    """Return validated_dataset with the pending captions marked, and with one text for each.

    Trigger words, replacements and shuffling apply to captions that nobody knows yet. Images with captions of
    a person have these alone.
    """
    is_pending = pl.col("sample_id").is_in(list(pending))
    of_model = is_pending & (pl.col("caption_from") == MODEL)
    more = {
        sample_id: json.dumps([each for each in json.loads(texts) if pending[sample_id] not in each])
        for sample_id, texts in validated.filter(is_pending).select("sample_id", "more_captions").iter_rows()
    }
    text = pl.col("sample_id").replace_strict(dict(pending), default=None, return_dtype=pl.String)
    without = pl.col("sample_id").replace_strict(more, default=None, return_dtype=pl.String)
    return validated.with_columns(
        caption=pl.when(of_model).then(text).otherwise("caption"),
        more_captions=pl.when(of_model).then(pl.lit("[]")).otherwise(pl.coalesce(without, "more_captions")),
        caption_from=pl.when(of_model).then(pl.lit(PENDING)).otherwise("caption_from"),
    )
