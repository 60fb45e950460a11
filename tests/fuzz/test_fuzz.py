"""Damaged images, manifests, models and recipes are accepted, or rejected with a reason and a fix.

`make test` runs a few cases of each kind. `python -m pytest -m fuzz` runs all of them, in about half an hour.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

MAX_PEAK_MB = 1_500
BATCH_CPU_S = 600
"""Processor time after which the process of a batch is ended."""

COMPLETE = {
    "images": (20_000, 250),
    "manifests": (5_000, 500),
    "headers": (5_000, 1_000),
    "recipes": (2_000, 500),
}
"""Number of cases by kind, and how many of them run in one process."""

BOUNDED = {"images": 84, "manifests": 60, "headers": 150, "recipes": 30}


def _limit_time() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (BATCH_CPU_S, BATCH_CPU_S))


def outcomes(folder: Path, kind: str, first: int, count: int) -> Counter[str]:
    """Run some cases in a process, which must neither crash nor hang nor use more memory than the budget."""
    folder.mkdir()
    process = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.cases", kind, str(folder), str(first), str(count)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=_limit_time,
        timeout=7_200,
    )
    batch = f"{kind} {first} to {first + count}"
    assert process.returncode == 0, f"{batch}: status {process.returncode}\n{process.stderr[-6000:]}"
    result = json.loads(process.stdout)
    assert result["peak_mb"] < MAX_PEAK_MB, batch
    assert sum(result["outcomes"].values()) == count, batch
    return Counter(result["outcomes"])


@pytest.mark.parametrize("kind", BOUNDED)
def test_a_few_damaged_files_are_accepted_or_rejected_with_a_reason(tmp_path: Path, kind: str) -> None:
    found = outcomes(tmp_path / "0", kind, 0, BOUNDED[kind])
    assert len(found) > 1, found


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.timeout(14_400)
@pytest.mark.parametrize("kind", COMPLETE)
def test_thousands_of_damaged_files_are_accepted_or_rejected_with_a_reason(tmp_path: Path, kind: str) -> None:
    num_cases, batch = COMPLETE[kind]
    found = Counter[str]()
    for first in range(0, num_cases, batch):
        found += outcomes(tmp_path / str(first), kind, first, batch)
    assert found.total() == num_cases
    assert 0 < found["accepted"] < num_cases
