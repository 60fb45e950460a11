from __future__ import annotations

import pytest

from pipeline.reporting.lettering import font, printable, shortened, wrapped

NAMES = [
    "rose.jpg",
    "Übung für Straße.png",
    "日本語の画像.jpg",
    "a" * 400 + "_0001.png",
    "\ud800.png",
    "a\nb\x1b[0m",
    "",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_fits_its_thumbnail(name: str) -> None:
    text = shortened(name, 11, 100)
    assert font(11).getlength(text) <= 100
    assert text.isprintable()


def test_I18_control_characters_are_escaped() -> None:
    assert printable("a\x1b[31m \n b\u202ejpg\ud800") == "a\\x1b[31m b\\u202ejpg\\ud800"


def test_a_long_name_keeps_both_ends() -> None:
    text = shortened("holiday_in_the_mountains_" * 5 + "0042.jpg", 11, 120)
    assert text.startswith("holiday")
    assert text.endswith("42.jpg")
    assert shortened("rose.jpg", 11, 120) == "rose.jpg"


def test_text_is_wrapped_between_words_without_losing_any() -> None:
    prompt = "a cup of espresso with a spoon on a red saucer, morning light, 35 mm photograph"
    lines = wrapped(prompt, 12, width_px=150, max_lines=20)
    assert " ".join(lines) == prompt
    assert len(lines) > 2
    assert [line for line in lines if font(12).getlength(line) > 150] == [], "lines longer than 150 px"


def test_text_beyond_the_last_line_ends_in_an_ellipsis() -> None:
    lines = wrapped("word " * 100, 12, width_px=150, max_lines=3)
    assert len(lines) == 3
    assert lines[-1].endswith("…")
    assert [line for line in lines if font(12).getlength(line) > 150] == [], "lines longer than 150 px"


def test_a_word_longer_than_a_line_is_divided() -> None:
    lines = wrapped("x" * 100, 12, width_px=80, max_lines=50)
    assert "".join(lines) == "x" * 100
    assert [line for line in lines if font(12).getlength(line) > 80] == [], "lines longer than 80 px"
