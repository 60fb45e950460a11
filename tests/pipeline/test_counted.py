from __future__ import annotations

import pytest

from pipeline.errors import counted, verb


@pytest.mark.parametrize(
    ("number", "words", "text"),
    [
        (0, ("image",), "0 images"),
        (1, ("image",), "1 image"),
        (2, ("image",), "2 images"),
        (12_345, ("entry", "entries"), "12,345 entries"),
        (1, ("entry", "entries"), "1 entry"),
        (1, ("image has", "images have"), "1 image has"),
    ],
)
def test_a_number_goes_with_the_form_of_its_word(number: int, words: tuple[str, ...], text: str) -> None:
    assert counted(number, *words) == text


def test_a_verb_goes_with_its_number() -> None:
    assert [verb(number, "is", "are") for number in (0, 1, 2)] == ["are", "is", "are"]
