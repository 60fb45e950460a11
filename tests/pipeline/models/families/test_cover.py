from __future__ import annotations

from pipeline.models.families import FAMILIES
from tests.pipeline.models.families.cover import cover, shared_parts


def test_the_complete_jobs_that_run_by_default_use_every_shared_part() -> None:
    parts = set[str]().union(*map(shared_parts, FAMILIES))
    assert len(parts) > 30
    assert set[str]().union(*map(shared_parts, cover())) == parts


def test_a_third_of_the_families_is_enough() -> None:
    assert len(cover()) <= len(FAMILIES) / 3, [spec.name for spec in cover()]


def test_a_family_whose_parts_others_have_too_is_not_chosen() -> None:
    """Without its own file, FLUX.2 dev consists of the parts of FLUX.2 klein."""
    klein, dev = (
        next(spec for spec in FAMILIES if spec.name == f"FLUX.2 {name}") for name in ("klein", "dev")
    )
    assert cover([klein, dev]) == [klein]
