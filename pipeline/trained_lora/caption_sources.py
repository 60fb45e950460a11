"""Who wrote the captions of a run: the models of `captions: {from: model}`, and persons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.raw_images.scan_index import SIDECAR
from pipeline.reporting.reports import read_report
from pipeline.storage.tables import Tables
from pipeline.validated_dataset.captions import EDITED, MODEL

if TYPE_CHECKING:
    from pipeline.recipe import Recipe


def caption_sources(recipe: Recipe, samples: pl.DataFrame) -> list[dict[str, Any]]:
    """Return a record of each captioning model that wrote captions of the recipe.

    A record has the model as the report of captions names it, and in `images` the number of training images
    with a caption of the model (`model`), from a caption file (`files`), and that a person has edited
    (`edits`). With `as: column`, an image can have captions of the model and of a file.

    Args:
        recipe: The recipe.
        samples: The table of trained_lora.
    """
    report = read_report(recipe.output_dir, "captions") if recipe.has_model_captions else None
    # Reports of before this record existed have no models.
    models: list[dict[str, Any]] = (report or {}).get("models", [])
    tables = Tables(recipe.output_dir)
    chosen = tables.read_previous("validated_dataset", ("sample_id", "caption_from")) if models else None
    if chosen is None:
        return []

    trained = samples.filter(pl.col("split") == "train").select("sample_id", "dataset")
    trained = trained.join(chosen, on="sample_id", how="left")
    both = [each.name for each in recipe.datasets if each.captions.as_ == "column"]
    written = tables.read_previous("captions", ("sample_id", "caption")) if both else None
    ids = [] if written is None else written.filter(pl.col("caption") != "")["sample_id"].to_list()

    source = pl.col("caption_from")
    has_both = pl.col("dataset").is_in(both) & pl.col("sample_id").is_in(ids) & (source != EDITED)
    by_source = {
        "model": (source == MODEL) | has_both,
        "files": source.str.starts_with(SIDECAR),
        "edits": source == EDITED,
    }
    records: list[dict[str, Any]] = []
    for model in models:
        of_model = trained.filter(pl.col("dataset").is_in(model["datasets"]))
        images = {name: of_model.filter(is_source).height for name, is_source in by_source.items()}
        records.append({**model, "images": images})
    return records
