"""Caption variants have prefix, trigger and postfix, and shuffled tags."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.recipe import CaptionSettings
from pipeline.validated_dataset.captions import canonical
from pipeline.validated_dataset.variants import variants


def variants_of(captions: list[str], **settings: Any) -> tuple[str, ...]:
    return variants(CaptionSettings.model_validate(settings), captions)


def test_a_caption_is_unchanged_by_default() -> None:
    assert variants_of(["a cat"]) == ("a cat",)


def test_prefix_trigger_caption_and_postfix_are_joined_in_order() -> None:
    assert variants_of(["a cat"], prefix="photo of ", trigger="sks", postfix=", 35mm") == (
        "photo of sks, a cat, 35mm",
    )


@pytest.mark.parametrize("caption", ["a sks cat", "sks", "cat, sks, dog", "(sks)"])
def test_a_trigger_word_in_the_caption_is_not_repeated(caption: str) -> None:
    assert variants_of([caption], trigger="sks") == (caption,)


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("a photo of [trigger], close-up", "a photo of sks, close-up"),
        ("[trigger] and [trigger]", "sks and sks"),
        ("a photo", "sks, a photo"),
    ],
)
def test_the_trigger_word_replaces_a_placeholder(caption: str, expected: str) -> None:
    assert variants_of([caption], trigger="sks", placeholder="[trigger]") == (expected,)


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("a photo of sks dog on grass", "a photo of dog on grass"),
        ("[trigger], asleep", "dog, asleep"),
        ("asks dogs", "asks dogs"),
        ("a poodle", "a poodle"),
    ],
)
def test_class_words_replace_the_trigger_word_which_is_not_added(caption: str, expected: str) -> None:
    settings = {"trigger": "sks dog", "placeholder": "[trigger]", "class_words": "dog"}
    assert variants_of([caption], **settings) == (expected,)


@pytest.mark.parametrize("caption", ["asks for more", "sksy", "SKS"])
def test_a_trigger_inside_another_word_does_not_count(caption: str) -> None:
    assert variants_of([caption], trigger="sks") == (f"sks, {caption}",)


def test_several_captions_become_distinct_variants_in_order() -> None:
    assert variants_of(["one", "two", "one"], postfix="!") == ("one!", "two!")


TAGS = "hero, red, green, blue, tall, round, old"


def test_tags_are_shuffled_except_the_kept_ones_at_the_start() -> None:
    orders = variants_of([TAGS], shuffle={"variants": 5, "keep": 2})
    assert orders[0] == TAGS
    assert len(orders) == 5
    for order in orders:
        assert order.split(", ")[:2] == ["hero", "red"]
        assert sorted(order.split(", ")) == sorted(TAGS.split(", "))
    assert orders == variants_of([TAGS], shuffle={"variants": 5, "keep": 2}), (
        "the same caption has the same orders"
    )


def test_more_variants_include_the_earlier_ones() -> None:
    few, many = (variants_of([TAGS], shuffle={"variants": count}) for count in (3, 6))
    assert many[:3] == few


def test_a_caption_with_one_tag_has_one_variant() -> None:
    assert variants_of(["a cat"], shuffle={"variants": 4}) == ("a cat",)


@given(st.lists(st.text("abc ", min_size=1, max_size=5), min_size=1, max_size=6), st.integers(0, 7))
def test_every_variant_is_canonical_and_has_the_same_tags(tags: list[str], keep: int) -> None:
    caption = canonical(", ".join(tags))
    if not caption:
        return
    wanted = sorted(tag.strip() for tag in caption.split(","))
    for order in variants_of([caption], shuffle={"variants": 4, "keep": keep}):
        assert canonical(order) == order
        assert sorted(tag.strip() for tag in order.split(",")) == wanted
