from __future__ import annotations

import os
import subprocess
import sys
from itertools import product

from pipeline.diagnosis.other_captions import MAX_COMPOSED, MAX_POOL, CaptionPool, words_of

COLOURS, SHAPES = ("red", "green", "blue"), ("circle", "square", "star")
CAPTIONS = [f"a {colour} {shape}" for colour, shape in product(COLOURS, SHAPES)]
LONG = [f"{each} on a {ground} background" for each, ground in product(CAPTIONS, ("white", "gray", "pink"))]


def test_each_word_is_tried_in_place_of_the_own_one_with_no_other_change() -> None:
    for own in CAPTIONS:
        others = CaptionPool(CAPTIONS).others(own, 4)
        assert {len(words_of(own) & words_of(other)) for other in others} == {2}
        tried = frozenset[str]().union(*map(words_of, others))
        assert tried == {"a", *COLOURS, *SHAPES}


def test_words_are_exchanged_although_no_image_has_the_result() -> None:
    captions = [
        "A red cup on the table",
        "a blue cup on the table",
        "an orange box",
        "a red box",
        "a cup on a table",
    ]
    pool = CaptionPool(captions)
    # Red has the place of orange and of blue, so these two can be exchanged. "The" and "a" are no such words.
    assert {"An orange cup on the table", "a blue cup on the table"} <= {*pool.others(captions[0], 9)}
    assert {"a blue box", "a red box"} <= {*pool.others("an orange box", 9)}
    everything = {each for caption in captions for each in pool.others(caption, 99)}
    assert not {each for each in everything if "box on" in each or "the cup" in each}


def test_the_number_of_captions_that_no_image_has_is_limited() -> None:
    captions = [
        f"colour{colour} thing{thing}" for colour, thing in product(range(40), range(40)) if colour == thing
    ]
    captions += [f"colour0 thing{thing}" for thing in range(40)] + [
        f"colour{colour} thing0" for colour in range(40)
    ]
    pool = CaptionPool(captions)
    everything = {each for caption in captions for each in pool.others(caption, 99)}
    assert len(everything.difference(captions)) == MAX_COMPOSED


def test_the_choice_depends_on_neither_order_nor_repetitions_and_never_has_the_own_words() -> None:
    pool, other = CaptionPool(CAPTIONS), CaptionPool([*reversed(CAPTIONS), *CAPTIONS, "Red circle, a!"])
    for own in CAPTIONS[1:]:
        others = pool.others(own, 20)
        assert len(others) == len({*others}) == 8
        assert own not in others
    assert "Red circle, a!" not in other.others("a red circle", 20)
    assert CaptionPool(reversed(CAPTIONS)).others(CAPTIONS[0], 4) == pool.others(CAPTIONS[0], 4)
    assert pool.others(CAPTIONS[0], 8)[:4] == pool.others(CAPTIONS[0], 4)


def test_captions_with_the_same_words_have_no_others() -> None:
    assert CaptionPool(["a photo of sks", "A photo of sks."]).others("a photo of sks", 8) == []
    assert CaptionPool([]).others("a cat", 8) == []


def test_a_caption_is_compared_with_captions_that_have_the_same_trigger_word() -> None:
    """The base model does not know it, and would prefer the words of the class images."""
    captions = ["a photo of sks on grass", "a photo of sks on sand", "a dog on grass", "a dog on sand"]
    captions += ["a photo of sks on snow", "a cat on snow"]

    def triggers_in(caption: str) -> frozenset[str]:
        return frozenset({"sks"} & words_of(caption))

    pool = CaptionPool(captions, triggers_in)
    assert {*pool.others(captions[0], 8)} == {captions[1], captions[4]}
    assert {*pool.others("a dog on grass", 8)} == {"a dog on sand", "a dog on snow", "a cat on snow"}
    assert "a dog on grass" in CaptionPool(captions).others(captions[0], 8)


def test_a_large_dataset_is_sampled() -> None:
    captions = [f"number{number}" for number in range(10_000)]
    chosen = {other for own in captions[:50] for other in CaptionPool(captions[:2_000]).others(own, 4)}
    assert len(chosen) <= MAX_POOL
    # An image outside of the sample has others too.
    assert len(CaptionPool(captions).others("number9999", 4)) == 4


def test_processes_choose_the_same_captions() -> None:
    """The order of a set of texts differs between processes."""
    code = (
        "from pipeline.diagnosis.other_captions import CaptionPool\n"
        "from tests.pipeline.diagnosis.test_other_captions import LONG\n"
        "print([CaptionPool(LONG).others(own, 8) for own in LONG])"
    )
    results = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in range(3)
    }
    assert len(results) == 1
