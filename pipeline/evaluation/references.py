"""The dataset images that pictures are compared with: held out, and trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from pipeline.evaluation.prompts import concepts_of

if TYPE_CHECKING:
    from pipeline.evaluation.prepare import Evaluation
    from pipeline.storage.tables import Tables


def reference_images(evaluation: Evaluation, tables: Tables) -> pl.DataFrame:
    """Return the images of the run, one row of vae_latents per image, in its largest bucket.

    Further columns are `root` (address of its dataset), `concept`, `caption` (its first) and `held_out`.
    Images that are no longer in vae_latents are omitted.
    """
    concepts = {
        dataset.name: concept
        for concept, datasets in concepts_of(evaluation.entries.recipe).items()
        for dataset in datasets
    }
    # Roots as they are now: the record of a run has neither secrets nor later places of its datasets.
    roots = {dataset.name: str(dataset.root) for dataset in evaluation.recipe.datasets}
    images = evaluation.inputs.unique("sample_id", keep="first", maintain_order=True).select(
        "sample_id", "held_out", caption=pl.col("captions").list.first()
    )
    rows = tables.read("vae_latents").filter(
        ~pl.col("flipped") & pl.col("dataset").is_in([*concepts.keys() & roots.keys()])
    )
    largest = (pl.col("target_height") * pl.col("target_width")).alias("_area")
    rows = rows.sort(largest, "bucket", descending=True).unique("sample_id", keep="first").sort("sample_id")
    return rows.join(images, on="sample_id", how="inner", maintain_order="left").with_columns(
        root=pl.col("dataset").replace_strict(roots, return_dtype=pl.String),
        concept=pl.col("dataset").replace_strict(concepts, return_dtype=pl.String),
    )
