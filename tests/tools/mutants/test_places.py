"""Which places of a source file are mutated, and the random sample of them."""

from __future__ import annotations

from collections import Counter

import pytest

from tools.mutants.places import function_at, lines_of_change, mutants_of, sample

SOURCE = '''
from __future__ import annotations

LIMIT = 3


def keep(sizes: list[int | None], *, folder: Path) -> dict[str, int | bool]:
    """Keep 7 sizes."""
    found: dict[int | str, int] = {}
    for size in sizes:
        if size is None or size > LIMIT:
            raise SizeError(f"{size + 1} is above {LIMIT - 1}", limit=LIMIT - 1)
        log(f"{size - 1} is kept", total=len(sizes) - 1)
        found[size] = size - 2
    save(folder / "sizes" / "found.json", found, durable=True)
    return dict(zip(found, sizes, strict=True))
'''


def changes(source: str = SOURCE) -> Counter[tuple[str, str]]:
    every = mutants_of("module.py", source)
    return Counter(lines_of_change(source, each.mutated(source)) for each in every)


def test_numbers_comparisons_loops_calls_and_keyword_arguments_are_changed() -> None:
    expected = {
        ("LIMIT = 3", "LIMIT = 4"),
        ("for size in sizes:", "for size in []:"),
        ("if size is None or size > LIMIT:", "if size is None or size >= LIMIT:"),
        ("if size is None or size > LIMIT:", "if size is not None or size > LIMIT:"),
        ("if size is None or size > LIMIT:", "if size is None and size > LIMIT:"),
        ("found[size] = size - 2", "found[size] = size + 2"),
        (
            'save(folder / "sizes" / "found.json", found, durable=True)',
            'save(folder / "sizes" / "found.json", found)',
        ),
        ('save(folder / "sizes" / "found.json", found, durable=True)', "pass"),
    }
    assert expected - changes().keys() == set()


@pytest.mark.parametrize(
    "line",
    ["def keep(", "found: dict", "raise SizeError", "log(", "return dict(", '"""Keep'],
    ids=["annotations", "annotated assignment", "error", "message", "zip strict", "docstring"],
)
def test_types_messages_and_what_has_no_effect_are_not_changed(line: str) -> None:
    changed = [was for was, _ in changes() if line in was]
    assert changed == []


def test_every_mutant_can_be_compiled_and_differs_from_the_source() -> None:
    for mutant in mutants_of("module.py", SOURCE):
        mutated = mutant.mutated(SOURCE)
        assert mutated != SOURCE, mutant
        compile(mutated, "module.py", "exec")


def test_a_sample_depends_on_the_seed_and_has_one_mutant_per_place() -> None:
    every = mutants_of("module.py", SOURCE)
    places = {each.span for each in every}
    complete = sample(every, 1000, seed=1)
    assert len(complete) == len({each.span for each in complete}) == len(places)
    assert sample(every, 5, seed=1) == sample(every, 5, seed=1)
    assert sample(every, 5, seed=1) != sample(every, 5, seed=2)


def test_a_line_belongs_to_the_innermost_function_with_its_decorators() -> None:
    source = "X = 1\nclass A:\n    @cache\n    def f(self):\n        return 2\n"
    assert [function_at(source, line) for line in range(1, 6)] == ["<module>", "A", "f", "f", "f"]
