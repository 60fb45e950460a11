"""What nearly all captions have in common, and captions of similar images that contradict each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl
import pytest

from pipeline.recipe import recipe_from_mapping
from pipeline.validated_dataset.caption_phrases import common_phrases, contradiction

PLACES = (
    "beach",
    "kitchen",
    "forest",
    "station",
    "garden",
    "office",
    "street",
    "museum",
    "bridge",
    "harbour",
)


def phrases(captions: Sequence[str], **settings: Any) -> list[dict[str, Any]]:
    values = {
        "datasets": [{"name": "d", "path": "data/d", "captions": settings}],
        "output_dir": "outputs/d",
        "model": {"base": "none/needed"},
    }
    (dataset,) = recipe_from_mapping("r", values).datasets
    ids = [f"d/{number:02}.png" for number in range(len(captions))]
    return list(common_phrases(dataset, pl.DataFrame({"sample_id": ids, "caption": captions})))


def texts(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str, int]]:
    return [(row["what"], row["text"], row["images"]) for row in rows]


def test_a_phrase_in_80_percent_of_the_captions_is_found_and_the_longest_one_counts() -> None:
    captions = [f"A bear at the {place}, on a wooden table." for place in PLACES]
    assert texts(phrases(captions, trigger="sks")) == [("phrase", "on a wooden table", 10)]
    captions[:2] = ["a bear with honey", "a bear and a fish"]
    (row,) = phrases(captions, trigger="sks")
    assert (row["images"], row["of"], row["without"]) == (8, 10, "d/00.png | d/01.png")
    assert phrases(["a bear asleep", *captions], trigger="sks") == [], "8 of 11 is less"
    assert phrases(captions[1:], trigger="sks") == [], "nine captions are too few to tell"


def test_a_single_word_is_found_only_as_a_tag() -> None:
    assert texts(phrases([f"{place}, solo, bear" for place in PLACES], trigger="sks")) == [
        ("phrase", "bear", 10),
        ("phrase", "solo", 10),
    ]
    assert phrases([f"a bear at the {place}" for place in PLACES], trigger="sks") == []


def test_texts_that_the_recipe_adds_are_no_findings() -> None:
    captions = [f"sks, photo of good quality, {place} with sks, film grain" for place in PLACES]
    settings = {"trigger": "sks", "prefix": "photo of good quality, ", "postfix": ", film grain"}
    assert phrases(captions, **settings) == []
    assert len(phrases(captions, trigger="sks")) == 2


def test_an_opening_of_all_captions_is_the_trigger_word_and_a_missing_one_is_found() -> None:
    captions = [f"sks bear, {place}" for place in PLACES]
    assert phrases(captions) == []
    assert texts(phrases(captions, trigger="bear")) == [("phrase", "sks", 10)]
    captions[3] = "a brown bear"
    (row,) = phrases(captions)
    assert (row["what"], row["text"], row["images"], row["without"]) == ("opening", "sks bear", 9, "d/03.png")
    assert phrases([f"a photo of {number}" for number in range(12)] + ["another"]) == []


@pytest.mark.parametrize(
    ("one", "other", "conflict"),
    [
        ("a red cup on a table", "A blue cup, seen from above", "red cup / blue cup"),
        ("two dogs on grass", "three dogs on grass", "two dogs / three dogs"),
        ("a man at night", "a man in the day", "night / day"),
        ("an old woman with a hat", "an old man with a hat", "woman / man"),
        ("a wooden boat near trees", "children playing football outside", "no word in common"),
        ("a red cup under a blue sky", "a blue sky over a cup", ""),
        ("a red cup", "a red and white cup", ""),
        ("a man and a woman", "a woman", ""),
        ("a cup", "a red saucer", ""),
        ("1girl, solo", "blue sky", ""),
    ],
)
def test_a_contradiction_names_both_sides(one: str, other: str, conflict: str) -> None:
    assert contradiction(one, other) == conflict
    swapped = contradiction(other, one)
    assert swapped == " / ".join(reversed(conflict.split(" / ")))
