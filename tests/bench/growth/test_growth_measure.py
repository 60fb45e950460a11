"""What is said about growth: exponent, time and memory a sample, and what is above the limits."""

import json
from pathlib import Path

import pytest

from bench.growth.measure import Growth, Once, as_json, chosen_stages, measure, run_once, table
from bench.growth.stages import STAGES, Stage

STAGE = Stage("stage", "works", 10.0, lambda project: None)


def growth(seconds: list[float], peak_bytes: list[int]) -> Growth:
    """Of 1,000, 10,000 and 100,000 samples; a round that is slower and one that is faster beside each."""
    rounds = [
        (Once(each * 3, peak), Once(each, peak), Once(each / 3, peak))
        for each, peak in zip(seconds, peak_bytes, strict=True)
    ]
    return Growth(STAGE, (1_000, 10_000, 100_000), tuple(rounds))


def test_quadratic_time_has_exponent_two_and_linear_time_one_whatever_a_start_costs() -> None:
    assert growth([0.01, 1.0, 100.0], [0, 0, 0]).exponent == pytest.approx(2)
    assert growth([0.5, 0.05, 0.5], [0, 0, 0]).exponent == pytest.approx(1)


def test_medians_of_the_rounds_decide() -> None:
    assert growth([0.1, 0.2, 0.3], [1, 2, 3]).seconds == [0.1, 0.2, 0.3]


def test_memory_a_sample_is_what_the_peak_gains_between_the_smallest_and_the_largest() -> None:
    assert growth([1, 1, 1], [50_000_000, 51_000_000, 149_000_000]).bytes_a_sample == 1000


def test_time_growth_and_memory_are_told_apart() -> None:
    assert growth([0.01, 0.1, 0.9], [0, 0, 1000]).excesses == []
    assert growth([0.1, 1.0, 2.0], [0, 0, 0]).excesses == ["time"]
    assert growth([0.001, 0.01, 0.2], [0, 0, 0]).excesses == ["growth"]
    assert growth([0.01, 0.1, 0.9], [0, 0, 10**9]).excesses == ["memory"]


def test_the_table_shows_what_the_json_holds() -> None:
    kept = json.loads(json.dumps(as_json([growth([0.1, 1.0, 20.0], [0, 0, 198_000_000])])))
    lines = table(kept).splitlines()
    assert lines[0].split()[:4] == ["growth", "1,000", "10,000", "100,000"]
    stage = ["stage", "0.100", "s", "1.000", "s", "20.000", "s"]
    assert lines[1].split() == [
        *stage,
        "1.30",
        "200.0",
        "us",
        "10",
        "us",
        "2,000",
        "B",
        "time,",
        "growth,",
        "memory",
    ]


def test_stages_are_chosen_by_the_beginnings_of_their_names() -> None:
    assert chosen_stages([]) == chosen_stages(["growth"]) == list(STAGES)
    assert [stage.name for stage in chosen_stages(["growth: scan"])] == ["scan cold", "scan unchanged"]
    assert chosen_stages(["scan"]) == []


def test_each_stage_runs_in_a_process_of_its_own_on_what_was_prepared(tmp_path: Path) -> None:
    stages = chosen_stages(["growth: validation cold", "growth: latents"])
    grown = measure(stages, tmp_path, (3, 6), rounds=1)
    assert [each.stage.name for each in grown] == [stage.name for stage in stages]
    for each in grown:
        assert [len(rounds) for rounds in each.rounds] == [1, 1]
        assert min(each.seconds) > 0
        assert min(each.peak_bytes) > 10_000_000, "an interpreter with numpy is larger"


def test_a_stage_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)scan cold failed:.*photos"):
        run_once(STAGES[0], tmp_path)
