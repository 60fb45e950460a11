"""A sample has one row per caption."""

from __future__ import annotations

import json

import polars as pl

from pipeline.text_embeddings.caption_rows import caption_variants


def test_samples_with_one_and_with_several_captions_have_rows_in_the_order_of_their_ids() -> None:
    captions = {"d": ["a cat"], "b": ["a", "b", ""], "c": ["a dog"], "a": ["x", "y"]}
    validated = pl.DataFrame(
        {
            "sample_id": list(captions),
            "caption": [first for first, *_ in captions.values()],
            "more_captions": [json.dumps(more) for _, *more in captions.values()],
        }
    )
    rows = caption_variants(validated).select("sample_id", "variant", "caption").rows()
    assert rows == [
        (sample_id, variant, caption)
        for sample_id in sorted(captions)
        for variant, caption in enumerate(captions[sample_id])
    ]
