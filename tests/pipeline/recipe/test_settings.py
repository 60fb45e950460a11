"""Lists of alternatives in messages."""

from pipeline.recipe.settings import one_of


def test_alternatives_are_joined_with_commas_and_or():
    assert one_of([8]) == "8"
    assert one_of([8, 40]) == "8 or 40"
    assert one_of(["a", "b", "c"]) == "a, b or c"
