"""What sources of captions teach: equal captions lead to one run, and the table compares scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from demo.captions_learned import MODEL, SOURCES, TRIGGER, TRUE, measured, table


def row(seed: int, source: str, score: float, right: int) -> dict[str, Any]:
    return {"seed": seed, "source": source, "concept_after": score, "right_captions": right, "captions": 48}


def test_the_table_has_each_source_s_mean_and_share_of_the_score_with_true_captions() -> None:
    scores = {TRUE: (0.4, 0.6), TRIGGER: (0.1, 0.3), MODEL: (0.4, 0.5)}
    rows = [
        row(seed, source, scores[source][seed], 24 if source == TRIGGER else 48)
        for seed in (0, 1)
        for source in SOURCES
    ]
    assert table(rows).splitlines() == [
        "| captions | right | seed 0 | seed 1 | mean | share |",
        "|---|---|---|---|---|---|",
        "| true captions | 96 of 96 | 0.40 | 0.60 | 0.50 | 1.00 |",
        "| only the trigger word | 48 of 96 | 0.10 | 0.30 | 0.20 | 0.40 |",
        "| captions of the model | 96 of 96 | 0.40 | 0.50 | 0.45 | 0.90 |",
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_equal_captions_lead_to_one_run_and_a_trigger_word_to_another(tmp_path: Path) -> None:
    short = {"steps": 1, "warmup_steps": 0}
    rows = {source: measured(tmp_path, 0, source, **short) for source in SOURCES}
    assert rows[MODEL] == {**rows[TRUE], "source": MODEL}
    assert rows[TRIGGER]["run"] != rows[TRUE]["run"]
    assert (rows[TRUE]["right_captions"], rows[TRIGGER]["right_captions"]) == (48, 24)
    assert len(list((tmp_path / "0" / "out" / "runs").iterdir())) == 2
