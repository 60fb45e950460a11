"""docs/hardware.md: computed times of steps, next to measured and published ones."""

from __future__ import annotations

from bench.gpu.configurations import PUBLISHED
from pipeline.memory.gpus import H100, HIGHEST, LOWEST
from pipeline.recipe import project_root
from tools.docs.hardware_page import PAGE
from tools.docs.step_times import TIMINGS, timing_lines

LONGER_CAPTIONS = "Z-Image"
"""A model whose computed step has 512 tokens of text; the published one has captions of a few words."""


def rows(name: str) -> list[list[str]]:
    page = (project_root() / PAGE).read_text(encoding="utf-8")
    table = page.partition(f"<!-- {name}: begin -->")[2].partition(f"<!-- {name}: end -->")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]


def test_computed_times_are_within_a_quarter_of_published_ones() -> None:
    compared = [row for row in rows("timings") if row[5] and row[0] != LONGER_CAPTIONS]
    assert len(compared) == sum(len(each.published) for each in TIMINGS if each.model != LONGER_CAPTIONS)
    ratios = {" ".join(row[:3]): float(row[3]) / float(row[5]) for row in compared}
    assert {name: ratio for name, ratio in ratios.items() if not 0.75 <= ratio <= 1.25} == {}


def test_the_range_that_plan_states_is_the_range_of_the_comparison() -> None:
    ratios = [float(known) / float(row[3]) for row in rows("timings") for known in row[4:6] if known]
    assert LOWEST <= min(ratios) < LOWEST + 0.01
    assert HIGHEST - 0.01 < max(ratios) <= HIGHEST
    page = " ".join((project_root() / PAGE).read_text(encoding="utf-8").split())
    assert f"{LOWEST:g} to {HIGHEST:g} times the computed" in page


def test_the_times_of_a_model_are_up_to_date() -> None:
    first = TIMINGS[0]
    for line in timing_lines(PUBLISHED, [first]):
        assert [cell.strip() for cell in line.strip("|").split("|")] in rows("timings")


def test_all_models_have_computed_times() -> None:
    assert [row[0] for row in rows("steps")] == [each.name for each in PUBLISHED]
    assert H100.name == "H100"
