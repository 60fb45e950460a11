"""The preview of `captions.replace`: the captions that it changes, before and after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import polars as pl

from pipeline.images.formats import ImageError
from pipeline.raw_images.manifest import captions_by_path, manifests_with_columns
from pipeline.raw_images.sources import sources_of
from pipeline.validated_dataset.captions import caption_of, replaced

if TYPE_CHECKING:
    from pipeline.recipe import DatasetSettings, Recipe
    from pipeline.storage.source import Source

PREVIEW_COLUMNS = ("sample_id", "before", "after")
"""Columns of the preview; `before` is the caption as its source holds it."""


def replacement_preview(recipe: Recipe, table: pl.DataFrame) -> pl.DataFrame:
    """Return the captions of validated_dataset that `captions.replace` changes, with `PREVIEW_COLUMNS`.

    Prefix, postfix and trigger word are not applied; of several captions, the changed ones are shown.
    """
    datasets = [each for each in recipe.datasets if each.captions.replace]
    with_columns = manifests_with_columns(datasets, max_bytes=recipe.checks.max_file_bytes)
    texts = {
        settings.name: captions_by_path(settings, manifest)
        for settings, manifest in with_columns
        if settings.captions.from_ == "column"
    }
    sources = sources_of(recipe)
    rows = [
        (sample_id, before, after)
        for settings in datasets
        for sample_id, path in table.filter(dataset=settings.name).select("sample_id", "path").iter_rows()
        for before, after in _changes(settings, sources, path, texts.get(settings.name, {}).get(path))
    ]
    return pl.DataFrame(rows, schema=dict.fromkeys(PREVIEW_COLUMNS, pl.String), orient="row")


def _changes(
    settings: DatasetSettings, sources: Mapping[str, Source], path: str, texts: tuple[str, ...] | None
) -> Iterator[tuple[str, str]]:
    as_written = settings.captions.model_copy(update={"replace": ()})
    try:
        before = caption_of(as_written, sources[settings.name], path, texts).texts
    except ImageError:  # the file changed after the captions were read
        return
    for text in before:
        after = replaced(settings.captions, text)
        if after != text:
            yield text, after
