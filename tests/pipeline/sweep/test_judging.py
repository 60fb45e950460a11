"""The comparison of variants: paired, with ties, limits and the cheapest of equals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from pipeline.errors import SweepError
from pipeline.sweep.judging import Cost, decide, judge
from pipeline.sweep.scores import numbered_prompts

IMAGES = 12


def cells(mean: float, *, noise: float = 0.0, shared: float = 0.5, seed: int = 0) -> pl.DataFrame:
    """Return scores of images that differ by `shared`, the same for all variants, and by `noise`."""
    of_images = np.random.default_rng(99).normal(0, shared, IMAGES)
    own = np.random.default_rng(seed).normal(0, noise, IMAGES) if noise else np.zeros(IMAGES)
    names = [f"image {number}" for number in range(IMAGES)]
    return pl.DataFrame({"prompt": names, "score": mean + of_images + own}).select(
        role=pl.lit(""), concept=pl.lit(""), prompt="prompt", seed=pl.lit(0, pl.Int64), score="score"
    )


def costs(*steps: int) -> dict[int, Cost]:
    return {number: (each, 1000, number) for number, each in enumerate(steps, start=1)}


NAMES = {number: f"variant {number}" for number in range(1, 6)}


def test_a_small_difference_is_found_because_images_are_paired() -> None:
    # Images differ by 0.5, and the variants by 0.1 on each image.
    quality = {1: cells(1.0), 2: cells(1.1, noise=0.02)}
    judged = judge(quality, costs(10, 10), {})
    assert list(judged.standings) == [2, 1]
    behind = judged.standings[1].behind
    assert behind.low is not None
    assert 0.05 < behind.low < behind.mean < 0.15
    score = judged.standings[1].score
    assert score.low is not None
    assert score.mean - score.low > 0.2, "unpaired, the interval is wider than the difference"
    decision = decide(judged, NAMES, num_variants=2)
    assert (decision.winner, decision.decided, decision.tied) == (2, True, ())
    assert decision.why.startswith("variant 2 is the best of 2 variants: 1.")


def test_of_tied_variants_the_one_with_fewer_steps_wins_and_then_the_smaller_one() -> None:
    quality = {1: cells(1.0, noise=0.05, seed=1), 2: cells(1.0, noise=0.05, seed=2), 3: cells(0.5)}
    decision = decide(judge(quality, costs(20, 10, 5), {}), NAMES, num_variants=3)
    assert (decision.winner, decision.tied) == (2, (1, 2))
    assert "tied" in decision.why
    sizes: dict[int, Cost] = {1: (10, 500, 1), 2: (10, 900, 2), 3: (10, 1, 3)}
    assert decide(judge(quality, sizes, {}), NAMES, num_variants=3).winner == 1


def test_a_variant_that_exceeds_a_limit_is_ranked_last_and_cannot_win() -> None:
    quality = {1: cells(2.0), 2: cells(1.0), 3: cells(0.9)}
    judged = judge(quality, costs(10, 10, 10), {1: "copies 0.3 above 0.1"})
    assert list(judged.standings) == [2, 3, 1]
    assert judged.standings[1].behind.mean < 0, "it is ahead of the best that is allowed"
    assert decide(judged, NAMES, num_variants=3).winner == 2
    broken = dict.fromkeys(quality, "copies 0.3 above 0.1")
    decision = decide(judge(quality, costs(10, 10, 10), broken), NAMES, num_variants=3)
    assert (decision.winner, decision.decided) == (None, False)
    assert "every variant exceeds a limit" in decision.why


def test_variants_that_are_not_better_than_the_base_model_have_no_winner() -> None:
    decision = decide(judge({1: cells(0.0), 2: cells(0.01)}, costs(1, 1), {}), NAMES, num_variants=2)
    assert (decision.winner, decision.decided) == (None, False)
    assert "no variant is measurably better than the base model" in decision.why


def test_too_few_scores_name_a_winner_but_decide_nothing() -> None:
    quality = {1: cells(1.0, noise=1.5, shared=0.1, seed=3), 2: cells(1.2, noise=1.5, shared=0.1, seed=4)}
    decision = decide(judge(quality, costs(1, 2), {}), NAMES, num_variants=2)
    assert decision.winner is not None
    assert not decision.decided
    assert "cannot tell" in decision.why


def test_variants_are_compared_by_the_cells_that_all_of_them_have() -> None:
    whole, part = cells(1.0), cells(1.0).head(5).with_columns(score=pl.col("score") - 0.1)
    judged = judge({1: whole, 2: part}, costs(1, 1), {})
    assert {standing.score.cells for standing in judged.standings.values()} == {5}
    assert judged.standings[2].behind.mean == pytest.approx(0.1)
    other = part.with_columns(prompt=pl.lit("another image"))
    with pytest.raises(SweepError, match="no held-out image and no prompt in common"):
        judge({1: whole, 2: other}, costs(1, 1), {})


def test_prompts_of_variants_with_other_captions_are_compared_in_their_order() -> None:
    def prompts(prefix: str) -> list[Any]:
        named = [("concept", "sks", "a cat"), ("concept", "sks", "a dog"), ("base", "", "a house")]
        return [
            SimpleNamespace(role=role, concept=concept, prompt=SimpleNamespace(caption=prefix + caption))
            for role, concept, caption in named
        ]

    scores = pl.DataFrame(
        {
            "role": ["base", "concept", "concept"],
            "concept": ["", "sks", "sks"],
            "prompt": ["my a house", "my a dog", "my a cat"],
            "seed": [0, 0, 0],
            "score": [0.1, 0.2, 0.3],
        }
    )
    numbered = numbered_prompts(scores, prompts("my "))
    assert numbered["prompt"].to_list() == ["1", "2", "1"]
    assert set(numbered["concept"]) == {""}
    assert numbered["score"].to_list() == [0.1, 0.2, 0.3]
