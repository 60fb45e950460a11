"""Planted faults are found, and clean pictures are not reported (docs/dataset_checks.md)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from demo.picture_faults import (
    CHECKS,
    FAULTS,
    Count,
    clean_dataset,
    findings_of,
    named_samples,
    table_of_faults,
)

MIN_FOUND = {"watermark": 0.9, "overexposed": 0.9, "shaken": 0.6}
"""Smallest fraction of strong faults that is found, where it is not all but one in twenty."""


def test_strong_faults_of_several_kinds_are_found_in_one_dataset(tmp_path: Path) -> None:
    dataset = clean_dataset(0)
    planted: dict[str, set[str]] = {}
    for name in ("blurred", "compressed", "dark", "bars"):
        rest = {key: sample for key, sample in dataset.items() if key not in set().union(*planted.values())}
        changed, planted[name] = FAULTS[name].plant(rest, FAULTS[name].strengths[2], np.random.default_rng(1))
        dataset = dataset | changed
    findings = findings_of(dataset, tmp_path)
    for name, samples in planted.items():
        assert len(samples & named_samples(findings[FAULTS[name].check])) >= len(samples) - 1, name
    reported = set[str]().union(*(named_samples(findings[check]) for check in CHECKS))
    clean = set(dataset) - set[str]().union(*planted.values())
    assert len(reported & clean) <= 0.05 * len(clean), sorted(reported & clean)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_published_table_holds(tmp_path: Path) -> None:
    rows = table_of_faults(tmp_path, range(2))
    for name in FAULTS:
        counts = [count for other, _, count in rows if other == name]
        alarms, others = sum(each.false_alarms for each in counts), sum(each.others for each in counts)
        assert alarms <= 0.05 * others, (name, counts)
    strongest: dict[str, Count] = {name: count for name, _, count in rows}
    for name, count in strongest.items():
        assert count.found >= MIN_FOUND.get(name, 0.95) * count.planted, (name, count)
