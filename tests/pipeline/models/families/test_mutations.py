"""A mutation of one family is noticed by the family's own tests, and by no others."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from pipeline.models.families import FAMILIES, FamilySpec
from tests.pipeline.models.families.mutations import (
    Mutation,
    apply,
    copy_sources,
    failing,
    mutations_of,
)
from tools.docs.families_page import module_of

SINGLE = [mutation for spec in FAMILIES for mutation in mutations_of(spec)]


def test_every_family_has_its_own_file_and_mutations() -> None:
    files = Counter(map(module_of, FAMILIES))
    assert [module for module, count in files.items() if count > 1] == []
    assert {mutation.spec.name for mutation in SINGLE} == {spec.name for spec in FAMILIES}


@pytest.mark.slow
@pytest.mark.parametrize("spec", FAMILIES, ids=module_of)
def test_the_mutations_of_all_other_families_fail_none_of_a_familys_tests(
    spec: FamilySpec, tmp_path: Path
) -> None:
    sources = copy_sources(tmp_path / "copy")
    for other in FAMILIES:
        if other is not spec:
            apply(sources, other, mutations_of(other))
    assert failing(sources, [f"test_{module_of(spec)}.py"]) == set()


@pytest.mark.slow
@pytest.mark.parametrize("mutation", SINGLE, ids=str)
def test_each_single_mutation_is_noticed(mutation: Mutation, tmp_path: Path) -> None:
    sources = copy_sources(tmp_path / "copy")
    own_tests = f"test_{module_of(mutation.spec)}.py"
    apply(sources, mutation.spec, [mutation])
    assert failing(sources, [own_tests], first_only=True) == {own_tests}
