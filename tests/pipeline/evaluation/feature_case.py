"""Small evaluations made of chosen feature vectors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from pipeline.evaluation.features import References, ScorerFeatures

NO_IMAGES = References([], [], [], [], np.zeros((0, 3), np.float32))


def references(
    features: Any,
    *,
    concept: str | Sequence[str] = "zorp",
    captions: Sequence[str] = (),
    groups: Sequence[str] = (),
) -> References:
    """Return images with these features, each in a group of its own unless `groups` is given."""
    number = len(features)
    names = [f"image {index}" for index in range(number)]
    concepts = [concept] * number if isinstance(concept, str) else list(concept)
    return References(
        concepts, names, list(captions) or names, list(groups) or names, np.asarray(features, np.float32)
    )


def scored(
    pictures: Iterable[Mapping[str, Any]],
    *,
    texts: Mapping[str, Any] | None = None,
    held_out: References = NO_IMAGES,
    training: References = NO_IMAGES,
    scorer: str = "tiny",
) -> ScorerFeatures:
    """Return an evaluation of pictures with the keys step, prompt, seed and feature.

    Other keys are role, concept and strength, with the defaults "concept", "zorp" and 1.0.
    """
    rows = list(pictures)
    table = pl.DataFrame(
        [
            {
                "step": each["step"],
                "strength": each.get("strength", 1.0) if each["step"] else 0.0,
                "prompt": each["prompt"],
                "role": each.get("role", "concept"),
                "concept": each.get("concept", "" if each.get("role") == "base" else "zorp"),
                "seed": each["seed"],
                "row": row,
                "picture": f"picture {row}",
            }
            for row, each in enumerate(rows)
        ]
    )
    features = np.array([each["feature"] for each in rows], dtype=np.float32)
    vectors = texts and {text: np.asarray(vector, np.float32) for text, vector in texts.items()}
    return ScorerFeatures(scorer, table, features, vectors, held_out, training)
