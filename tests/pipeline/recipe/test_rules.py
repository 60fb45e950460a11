"""Rules that compare values suggest values that work."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline.recipe.rules import divisible, one_of


@given(st.integers(8, 4096), st.integers(1, 512))
def test_every_suggested_resolution_and_step_would_be_accepted(resolution: int, step: int):
    broken = divisible(resolution, step)
    assert (broken is None) == (resolution % step == 0)
    if broken is None:
        return
    head, _, tail = broken.fix.partition(", or set buckets.step to ")
    for suggested in numbers(head):
        assert divisible(suggested, step) is None
    for suggested in numbers(tail):
        assert divisible(resolution, suggested) is None
        assert suggested % 8 == 0
        assert suggested < step


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.replace(",", " ").split() if word.isdigit()]


def test_the_example_of_a_resolution_that_is_no_multiple_of_the_step():
    broken = divisible(1000, 64)
    assert broken is not None
    assert broken.what == "resolution 1000 is not a multiple of step 64"
    assert broken.fix == "use 960 or 1024, or set buckets.step to 8 or 40"


def test_choices_are_joined_as_in_speech():
    assert one_of([8]) == "8"
    assert one_of([8, 40]) == "8 or 40"
    assert one_of(["a", "b", "c"]) == "a, b or c"
