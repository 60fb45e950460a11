"""Caption variants have prefix, trigger and postfix, and shuffled and dropped tags."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

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


def test_tags_are_dropped_except_the_kept_ones_and_in_their_order() -> None:
    dropped = {"rate": 0.5, "variants": 9, "keep": 2}
    texts = variants_of([TAGS], drop_tags=dropped)
    assert texts[0] == TAGS
    assert len(texts) == 9
    assert len(set(texts)) > 4
    for text in texts:
        tags = text.split(", ")
        assert tags[:2] == ["hero", "red"]
        assert tags == [tag for tag in TAGS.split(", ") if tag in tags]
    assert texts == variants_of([TAGS], drop_tags=dropped), "the same caption has the same variants"
    assert texts[:4] == variants_of([TAGS], drop_tags={**dropped, "variants": 4})


def test_the_fraction_of_dropped_tags_matches_the_rate() -> None:
    # 64 captions of 20 tags, each in 15 variants; the standard deviation of the fraction is 0.003.
    captions = [", ".join(f"{number} {tag}" for tag in range(20)) for number in range(64)]
    settings = {"rate": 0.1, "variants": 16, "keep": 0}
    texts = [text for caption in captions for text in variants_of([caption], drop_tags=settings)[1:]]
    assert len(texts) == 64 * 15, "equal variants count, or the fraction would be larger"
    kept = sum(text.count(",") + 1 for text in texts) / (len(texts) * 20)
    assert abs(1 - kept - 0.1) < 0.012


def test_with_shuffling_the_same_tags_are_dropped_in_another_order() -> None:
    both = {"shuffle": {"variants": 5, "keep": 1, "separator": ";"}, "drop_tags": {"rate": 0.5}}
    caption = TAGS.replace(",", ";")
    shuffled = variants_of([caption], **both)
    alone = variants_of([caption], drop_tags={"rate": 0.5, "variants": 5, "separator": ";"})
    assert [sorted(text.split("; ")) for text in shuffled] == [sorted(text.split("; ")) for text in alone]
    assert shuffled != alone


@pytest.mark.parametrize(
    ("caption", "settings", "expected"),
    [
        ("a, sks cat, b", {"trigger": "sks"}, "sks cat"),
        ("a, [t], b", {"trigger": "sks", "placeholder": "[t]"}, "sks"),
        ("a, b", {"trigger": "sks"}, "sks, b"),
    ],
)
def test_the_trigger_word_and_one_tag_are_never_dropped(
    caption: str, settings: dict[str, Any], expected: str
) -> None:
    texts = variants_of([caption], drop_tags={"rate": 1.0, "keep": 0}, **settings)
    assert len(texts[1:]) == 3
    if "sks," in expected:
        assert {*texts[1:]} <= {"sks, a", "sks, b"}
    else:
        assert {*texts[1:]} == {expected}


def test_settings_that_shuffle_decides_must_not_be_set_for_dropping_too() -> None:
    with pytest.raises(ValidationError, match=r"drop_tags\.keep must not be set next to shuffle"):
        variants_of([TAGS], shuffle={"keep": 2}, drop_tags={"rate": 0.1, "keep": 3})
