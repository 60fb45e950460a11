"""Features of drawn pictures and of the dataset's images, as one scorer computes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import polars as pl


@dataclass(frozen=True)
class References:
    """Images of the dataset, M of them.

    Attributes:
        concepts: Concept of each image.
        names: Sample id of each image.
        captions: Prompt that describes each image, as it is in `ScorerFeatures.pictures`.
        groups: Group of near duplicates of each image.
        features: float32 array (M, D).
    """

    concepts: list[str]
    names: list[str]
    captions: list[str]
    groups: list[str]
    features: npt.NDArray[np.float32]


@dataclass(frozen=True)
class ScorerFeatures:
    """Features of one scorer, which need not be normalised.

    Attributes:
        scorer: Name in the recipe.
        pictures: One row per drawn picture, with the columns step, strength, prompt, role, concept, seed, row
            and picture. `row` is the index into `features`. Pictures of the base model have step 0, and each
            other picture has exactly one of them with the same role, concept, prompt and seed.
        features: float32 array (N, D).
        texts: Features (D,) of each prompt; None if the scorer reads no texts.
        held_out: Images of the holdout.
        training: Images that were trained on.
    """

    scorer: str
    pictures: pl.DataFrame
    features: npt.NDArray[np.float32]
    texts: Mapping[str, npt.NDArray[np.float32]] | None
    held_out: References
    training: References
