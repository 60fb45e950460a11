"""docs/hardware.md: computed times of steps, next to measured and published ones."""

from __future__ import annotations

import pytest

from bench.gpu.configurations import PUBLISHED
from bench.operations import Work
from pipeline.recipe import project_root
from tools.docs.hardware_page import PAGE
from tools.docs.step_times import BANDWIDTH_SHARE, H100, KERNEL_S, TIMINGS, Gpu, timing_lines

LONGER_CAPTIONS = "Z-Image"
"""A model whose computed step has 512 tokens of text; the published one has captions of a few words."""


def rows(name: str) -> list[list[str]]:
    page = (project_root() / PAGE).read_text(encoding="utf-8")
    table = page.partition(f"<!-- {name}: begin -->")[2].partition(f"<!-- {name}: end -->")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]


def test_a_step_takes_as_long_as_the_gpu_computes_or_the_cpu_starts_kernels() -> None:
    gpu = Gpu("", 24, 100e12, 1e12)
    work = Work(10, 50 * 10**12, 25 * 10**12, 9 * 10**11, 0)
    assert gpu.seconds(work) == pytest.approx(1.0 + 0.5 + 0.9 / BANDWIDTH_SHARE)
    assert gpu.seconds(work, float32=True) == pytest.approx(2.0 + 1.0 + 0.9 / BANDWIDTH_SHARE)
    assert gpu.seconds(Work(10**6, 0, 0, 0, 0)) == pytest.approx(10**6 * KERNEL_S)


def test_computed_times_are_within_a_quarter_of_published_ones() -> None:
    compared = [row for row in rows("timings") if row[5] and row[0] != LONGER_CAPTIONS]
    assert len(compared) == sum(len(each.published) for each in TIMINGS if each.model != LONGER_CAPTIONS)
    ratios = {" ".join(row[:3]): float(row[3]) / float(row[5]) for row in compared}
    assert {name: ratio for name, ratio in ratios.items() if not 0.75 <= ratio <= 1.25} == {}


def test_the_times_of_a_model_are_up_to_date() -> None:
    first = TIMINGS[0]
    for line in timing_lines(PUBLISHED, [first]):
        assert [cell.strip() for cell in line.strip("|").split("|")] in rows("timings")


def test_all_models_have_computed_times() -> None:
    assert [row[0] for row in rows("steps")] == [each.name for each in PUBLISHED]
    assert H100.name == "H100"
