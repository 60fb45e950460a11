"""The options of `latentline sample`; tests/e2e/test_sample.py runs the complete command."""

from __future__ import annotations

import pytest

from pipeline.cli.sample import parse_prompts, parse_strengths
from pipeline.cli.step_options import parse_steps
from pipeline.errors import DrawingError


def test_steps_and_strengths_are_repeated_or_comma_separated_without_repetitions() -> None:
    assert parse_steps(["250, 500", "250", "750"]) == (250, 500, 750)
    assert parse_steps(["all"]) == "all"
    assert parse_steps([]) == ()
    assert parse_strengths(["0,0.5", "1", "0.50", "-0"]) == (0.0, 0.5, 1.0)
    assert str(parse_strengths(["-0"])[0]) == "0.0"
    assert parse_strengths([]) == (1.0,)
    assert parse_prompts(["a cat, red", "a dog", "a cat, red"]) == ("a cat, red", "a dog")


@pytest.mark.parametrize("text", ["0", "-5", "1.5", "last", "", "1,,2", "²"])
def test_a_step_that_is_not_a_positive_integer_is_an_error(text: str) -> None:
    with pytest.raises(DrawingError, match="a step must be a positive integer") as raised:
        parse_steps([text])
    assert raised.value.where == "--step"


@pytest.mark.parametrize("text", ["nan", "inf", "1e999", "half", "", "0.5,"])
def test_a_strength_that_is_not_finite_is_an_error(text: str) -> None:
    with pytest.raises(DrawingError, match="a strength must be a finite number") as raised:
        parse_strengths([text])
    assert raised.value.where == "--strength"
    assert "0,0.5,1" in raised.value.fix


def test_an_empty_prompt_is_an_error() -> None:
    with pytest.raises(DrawingError, match="a prompt is empty"):
        parse_prompts(["a cat", " "])
