"""The project's own mutation operators."""

from __future__ import annotations

import pytest
from cosmic_ray.mutating import mutate_code

from tools.mutants.operators import RemoveCall, RemoveItem

EXAMPLES = [(kind, example) for kind in (RemoveCall, RemoveItem) for example in kind.examples()]


@pytest.mark.parametrize(
    ("kind", "example"), EXAMPLES, ids=lambda each: getattr(each, "pre_mutation_code", "")
)
def test_each_operator_makes_the_change_of_its_examples(kind: type, example) -> None:
    mutated = mutate_code(example.pre_mutation_code, kind(), example.occurrence)
    assert mutated == example.post_mutation_code


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "def f():\n    sync(\n        a,  # why\n    )\n    return a\n",
            "def f():\n    pass\n    return a\n",
        ),
        ("x = {'a': 1,\n     **b, 'c': 2}", "x = {\n     **b, 'c': 2}"),
        ("x = {name: 1 for name in names}", None),
        ("f(a, *b, **c)", None),
    ],
    ids=["a call over several lines", "an entry before an unpacking", "a comprehension", "stars"],
)
def test_statements_and_items_over_several_lines_are_removed_completely(
    source: str, expected: str | None
) -> None:
    operator = RemoveCall() if "sync" in source else RemoveItem()
    assert mutate_code(source, operator, 0) == expected
