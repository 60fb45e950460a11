"""Growth has an exponent, time and memory per sample, and a list of exceeded bounds."""

import json
from pathlib import Path

import pytest

from bench.growth.measure import Growth, Once, as_json, chosen_stages, from_json, measure, run_once, table
from bench.growth.stages import STAGES, Stage

STAGE = Stage("stage", "works", 10.0, lambda project: None)


BASE_BYTES = 40_000_000


def growth(seconds: list[float], peak_bytes: list[int]) -> Growth:
    """Return the growth at 1,000, 10,000 and 100,000 samples, each with a slower and a faster round."""
    rounds = [
        tuple(Once(time, BASE_BYTES, peak) for time in (each * 3, each, each / 3))
        for each, peak in zip(seconds, peak_bytes, strict=True)
    ]
    return Growth(STAGE, (1_000, 10_000, 100_000), tuple(rounds))


def test_quadratic_time_has_exponent_two_and_linear_time_one_despite_fixed_costs() -> None:
    assert growth([0.01, 1.0, 100.0], [0, 0, 0]).exponent == pytest.approx(2)
    assert growth([0.5, 0.05, 0.5], [0, 0, 0]).exponent == pytest.approx(1)


def test_seconds_are_the_medians_of_the_rounds() -> None:
    assert growth([0.1, 0.2, 0.3], [1, 2, 3]).seconds == [0.1, 0.2, 0.3]


def test_the_cost_of_a_sample_is_the_increase_between_the_two_largest_numbers() -> None:
    grown = growth([0.5, 0.6, 1.5], [90_000_000, 91_000_000, 181_000_000])
    assert grown.us_a_sample == pytest.approx(10)
    assert grown.bytes_a_sample == 1000


def test_in_all_is_the_total_divided_by_the_largest_number() -> None:
    grown = growth([0.5, 0.6, 1.5], [90_000_000, 91_000_000, 181_000_000])
    assert grown.us_in_all == pytest.approx(15)
    assert grown.bytes_in_all == 1410


def test_time_growth_and_memory_exceed_their_bounds_independently() -> None:
    assert growth([0.01, 0.1, 0.9], [0, 0, 1000]).excesses == []
    assert growth([0.1, 1.0, 2.0], [0, 0, 0]).excesses == ["time"]
    assert growth([0.001, 0.01, 0.2], [0, 0, 0]).excesses == ["growth"]
    assert growth([0.01, 0.1, 0.9], [0, 0, 10**9]).excesses == ["memory"]


def test_stored_measurements_are_read_back_unchanged() -> None:
    before = growth([0.3, 0.6, 21.0], [0, 0, 198_000_000])
    after = from_json(json.loads(json.dumps(as_json([before]))))[0]
    assert after.counts == before.counts
    assert after.seconds == pytest.approx(before.seconds)
    assert [len(rounds) for rounds in after.rounds] == [3, 3, 3]
    assert (after.peak_bytes, after.bytes_in_all) == (before.peak_bytes, before.bytes_in_all)
    assert (after.stage.name, after.stage.work, after.stage.most_us) == ("stage", "works", 10.0)


def test_the_table_shows_the_stored_measurements() -> None:
    stored = json.loads(json.dumps(as_json([growth([0.1, 1.0, 19.0], [0, 0, 360_000_000])])))
    lines = table(stored).splitlines()
    assert lines[0].split()[:4] == ["growth", "1,000", "10,000", "100,000"]
    expected = "stage 0.100 s 1.000 s 19.000 s 1.28 200.0 us 190.0 us 10 us 4,000 B 3,200 B 3,000 B"
    assert " ".join(lines[1].split()) == f"{expected} time, growth, memory"


def test_stages_are_chosen_by_name_prefix() -> None:
    assert chosen_stages([]) == chosen_stages(["growth"]) == list(STAGES)
    assert [stage.name for stage in chosen_stages(["growth: scan"])] == ["scan cold", "scan unchanged"]
    assert chosen_stages(["scan"]) == []


@pytest.mark.slow
def test_each_stage_runs_in_a_separate_process_on_the_prepared_project(tmp_path: Path) -> None:
    stages = chosen_stages(["growth: validation cold", "growth: latents"])
    grown = measure(stages, tmp_path, (3, 6), rounds=1)
    assert [each.stage.name for each in grown] == [stage.name for stage in stages]
    for each in grown:
        assert [len(rounds) for rounds in each.rounds] == [1, 1]
        assert min(each.seconds) > 0
        assert 0 <= each.bytes_in_all < min(each.peak_bytes)
        assert min(each.peak_bytes) > 10_000_000, "an interpreter with numpy is larger"


def test_a_failed_stage_reports_its_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)scan cold failed:.*photos"):
        run_once(STAGES[0], tmp_path)
