"""A mutation of one family is noticed by the family's own tests, and by no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.models.families import FAMILIES, FamilySpec
from tests.pipeline.models.families.mutations import (
    Mutation,
    apply,
    copy_sources,
    failing,
    family_tests,
    mutations_of,
)
from tools.docs.families_page import module_of

SINGLE = [mutation for spec in FAMILIES for mutation in mutations_of(spec)]


def test_every_family_has_its_own_file_and_mutations() -> None:
    assert len({module_of(spec) for spec in FAMILIES}) == len(FAMILIES)
    assert {mutation.spec.name for mutation in SINGLE} == {spec.name for spec in FAMILIES}


@pytest.mark.slow
@pytest.mark.timeout(1800)  # runs the tests of all families
@pytest.mark.parametrize("spec", FAMILIES, ids=module_of)
def test_all_mutations_of_one_family_fail_its_own_tests_and_no_others(
    spec: FamilySpec, tmp_path: Path
) -> None:
    sources = copy_sources(tmp_path / "copy")
    apply(sources, spec, mutations_of(spec))
    assert failing(sources, family_tests()) == {f"test_{module_of(spec)}.py"}


@pytest.mark.slow
@pytest.mark.parametrize("mutation", SINGLE, ids=str)
def test_each_single_mutation_is_noticed(mutation: Mutation, tmp_path: Path) -> None:
    sources = copy_sources(tmp_path / "copy")
    own_tests = f"test_{module_of(mutation.spec)}.py"
    apply(sources, mutation.spec, [mutation])
    assert failing(sources, [own_tests], first_only=True) == {own_tests}
