"""The captions that a model would write in the next job."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from pipeline.validated_dataset.captions import canonical

if TYPE_CHECKING:
    from pipeline.cache.recipe_entries import RecipeEntries
    from pipeline.storage.tables import Tables

PENDING = "(the caption of {}, which is not written yet)"
"""Text in place of a caption that only the job can write; it is different for each image."""


def forecast_captions(
    entries: RecipeEntries, tables: Tables, raw: pl.DataFrame
) -> tuple[Expected, pl.DataFrame] | None:
    """Return the captions to write, and the table captions as the job would write it; None for other recipes.

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
    for settings, images in by_request(recipe, images_to_caption(recipe, raw, log=entries.log)):
        model = resolve_model(entries, settings)
        requests = caption_requests(entries, model, settings, images, known).rows
        pending: set[str] = set()
        for row, spec, status in unusable_entries(
            entries, expected, requests, known, spec_of=lambda row: caption_spec(row["key"])
        ):
            pending.add(row["key"])
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
        present = set(rows["key"]) - pending
        texts |= {key: canonical(read_caption(entries.store, key)) for key in sorted(present - texts.keys())}
        captions = [
            PENDING.format(sample_id) if key in pending else texts[key]
            for sample_id, key in rows.select("sample_id", "key").iter_rows()
        ]
        nothing = {name: kind for name, kind in SCHEMAS[ASSET].items() if name not in rows.columns}
        rows = rows.with_columns(pl.lit(None, kind).alias(name) for name, kind in nothing.items())
        parts.append(rows.with_columns(caption=pl.Series(captions, dtype=pl.String)).select(*SCHEMAS[ASSET]))
    estimate_seconds(entries, expected, cost=cost)
    return expected, pl.concat(parts)
