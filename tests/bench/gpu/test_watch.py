"""Measurements of a side: seconds, memory, and the share of time in which the device is idle."""

from __future__ import annotations

import time

import pytest
import torch

from bench.gpu.watch import Watch, covered


def test_covered_is_the_length_of_the_union() -> None:
    assert covered([]) == 0
    assert covered([(5, 7), (0, 2), (1, 3), (1, 2)]) == 5
    assert covered([(0, 10), (2, 3), (9, 12)]) == 12


def test_only_the_work_is_measured_and_a_reading_has_seconds_and_bytes() -> None:
    watch = Watch("cpu")
    time.sleep(0.2)
    with watch.work(without_bytes=1000):
        pass
    assert watch.reading["seconds"] < 0.2
    assert watch.reading["bytes"] > 1e6
    assert "share" not in watch.reading


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_recorded_pass_measures_the_idle_share() -> None:
    idle, busy = Watch("cpu", recorded=True), Watch("cpu", recorded=True)
    matrix = torch.randn(400, 400)
    with idle.work():
        matrix @ matrix
        time.sleep(0.5)
    with busy.work():
        for _ in range(50):
            matrix = (matrix @ matrix).tanh()
    assert idle.reading["share"] > 0.5
    assert 0.0 <= busy.reading["share"] < idle.reading["share"]
