"""A slip in one family's file is seen by the family's own tests, and by them alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.models.families import FAMILIES, Family
from tests.pipeline.models.families.mutations import (
    copy_sources,
    failing,
    module_of,
    own_methods,
    proving_files,
    slip,
)

SINGLE = [(family, method) for family in FAMILIES for method in own_methods(family)]


def test_every_family_has_a_file_of_its_own_with_something_to_slip_in() -> None:
    assert len({module_of(family) for family in FAMILIES}) == len(FAMILIES)
    assert [family.name for family in FAMILIES if not own_methods(family)] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)  # runs the tests of all families
@pytest.mark.parametrize("family", FAMILIES, ids=module_of)
def test_slips_in_every_method_of_one_family_fail_its_own_tests_alone(
    family: type[Family], tmp_path: Path
) -> None:
    sources = copy_sources(tmp_path / "copy")
    slip(sources, family, own_methods(family))
    assert failing(sources, proving_files()) == {f"test_{module_of(family)}.py"}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "method"), SINGLE, ids=lambda value: getattr(value, "__name__", value))
def test_each_single_slip_is_seen(family: type[Family], method: str, tmp_path: Path) -> None:
    sources = copy_sources(tmp_path / "copy")
    own = f"test_{module_of(family)}.py"
    slip(sources, family, [method])
    assert failing(sources, [own], first_only=True) == {own}
