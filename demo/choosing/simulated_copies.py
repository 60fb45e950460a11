"""Simulated LoRAs of one caption that draw their training pictures, or new ones: does `copies` see it?

    python -m demo.choosing.simulated_copies   # print the table in docs/evaluation.md

A LoRA that the demo trained on six pictures with one caption memorised none of them, so the "pictures of a
step" are training pictures with noise, or new pictures of the concept. demo.memorising has LoRAs that were
trained on captions of their own, and memorised pictures.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from PIL import Image

from demo.choosing.datasets import NAME, SHAPE
from demo.pixel_statistics import PixelScorer
from demo.score import WorldScorer
from demo.world import Array, draw_scene, scenes
from pipeline.evaluation.choice import breaks_limit
from pipeline.evaluation.features import References, ScorerFeatures
from pipeline.evaluation.intervals import Interval
from pipeline.evaluation.numbers import measure
from pipeline.recipe.evaluation import LimitSettings

NUM_TRAINED, NUM_HELD_OUT, NUM_DRAWN = 6, 6, 24
SEEDS = range(10)
SCORERS = {"world": WorldScorer, "pixels": PixelScorer}

_NOISE = 6.0
"""Standard deviation of the noise in copied pictures; pixels are 0 to 255."""


def copies(scorer: str, seed: int, *, memorised: bool) -> Interval:
    """Return the number `copies` of a simulated step.

    Training and held-out pictures are random scenes of the concept, each with one caption.
    """
    random = np.random.default_rng(seed)
    all_scenes = scenes(SHAPE)
    order = random.permutation(len(all_scenes))[: NUM_TRAINED + NUM_HELD_OUT]
    real = [draw_scene(all_scenes[index], random) for index in order]
    trained, held_out = real[:NUM_TRAINED], real[NUM_TRAINED:]

    def new_picture() -> Array:
        return draw_scene(all_scenes[random.integers(len(all_scenes))], random)

    def copied_picture() -> Array:
        picture = trained[random.integers(len(trained))]
        noisy = picture + random.normal(0, _NOISE, picture.shape)
        return noisy.clip(0, 255).astype(np.uint8)

    base = [new_picture() for _ in range(NUM_DRAWN)]
    drawn = [copied_picture() if memorised else new_picture() for _ in range(NUM_DRAWN)]
    return _measured(scorer, base, drawn, held_out, trained)


def _measured(
    name: str, base: list[Array], drawn: list[Array], held_out: list[Array], trained: list[Array]
) -> Interval:
    scorer = SCORERS[name]()

    def features(pictures: list[Array]) -> Array:
        return scorer.picture_features([Image.fromarray(each) for each in pictures])

    def references(pictures: list[Array]) -> References:
        names = [str(number) for number in range(len(pictures))]
        return References([NAME] * len(names), names, [NAME] * len(names), names, features(pictures))

    rows = [
        {
            "step": step,
            "strength": float(step),
            "prompt": NAME,
            "role": "concept",
            "concept": NAME,
            "seed": seed,
            "row": step * NUM_DRAWN + seed,
            "picture": "",
        }
        for step in (0, 1)
        for seed in range(NUM_DRAWN)
    ]
    scored = ScorerFeatures(
        scorer=name,
        pictures=pl.DataFrame(rows),
        features=features([*base, *drawn]),
        texts=None,
        held_out=references(held_out),
        training=references(trained),
    )
    (step,) = measure([scored]).steps
    assert step.copies is not None
    return step.copies


def num_flagged(scorer: str, *, memorised: bool) -> int:
    """Return for how many of `SEEDS` the check `not_memorised` fails with its default limit."""
    numbers = [copies(scorer, seed, memorised=memorised) for seed in SEEDS]
    limit = LimitSettings().copies
    return sum(breaks_limit("copies", each.mean, each.low, limit) for each in numbers)


def main() -> None:
    """Print the table."""
    print("| scorer | memorised: flagged | new pictures: flagged |\n|---|---|---|")
    for scorer in SCORERS:
        cells = [f"{num_flagged(scorer, memorised=each)} of {len(SEEDS)}" for each in (True, False)]
        print(f"| {scorer} | {cells[0]} | {cells[1]} |")


if __name__ == "__main__":
    main()
