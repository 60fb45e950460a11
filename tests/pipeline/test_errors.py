"""An error shows the problem, its location and a fix, in that order, with words that match their number."""

from __future__ import annotations

import pickle

import pytest

from pipeline.errors import BucketError, counted, verb


def test_an_error_shows_what_where_and_fix_on_aligned_lines() -> None:
    error = BucketError("resolution 1000 is wrong", where="flowers.yaml:14", fix="use 960\nor 1024")
    lines = str(error).splitlines()
    assert lines == [
        "resolution 1000 is wrong",
        "  where: flowers.yaml:14",
        "  fix:   use 960",
        "         or 1024",
    ]


def test_an_error_survives_pickling() -> None:
    error = BucketError("what", where="where", fix="fix")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is BucketError
    assert (copy.what, copy.where, copy.fix) == ("what", "where", "fix")


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
def test_a_noun_has_the_form_of_its_number(number: int, words: tuple[str, ...], text: str) -> None:
    assert counted(number, *words) == text


def test_a_verb_has_the_form_of_its_number() -> None:
    assert [verb(number, "is", "are") for number in (0, 1, 2)] == ["are", "is", "are"]
