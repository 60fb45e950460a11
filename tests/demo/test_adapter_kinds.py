"""The study of adapter kinds: all train the same layers, and its table names the best rate of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from demo.adapter_kinds import KINDS, RATES, best_rate, lora_settings, report, score_run
from demo.experiments import changed_demo


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_trains_the_same_layers(tmp_path: Path, kind: str) -> None:
    lora = changed_demo(tmp_path, training={"lora": lora_settings(kind)}).training.lora
    assert (lora.targets, lora.conv_rank, lora.text_encoders) == ("blocks", None, None)


def line(kind: str, rate: float, seed: int, concept: float, known: float) -> dict[str, Any]:
    return {"kind": kind, "rate": rate, "seed": seed, "concept": concept, "known": known}


def test_the_table_has_the_rate_that_draws_most_pictures_right() -> None:
    lines = [
        line("oft", 1e-3, 0, 0.5, 0.2),
        line("oft", 5e-3, 0, 0.4, 0.8),
        line("oft", 5e-3, 1, 0.5, 0.7),
        line("oft", 5e-3, 2, 0.6, 0.6),
    ]
    assert best_rate(lines, "oft") == 5e-3
    row = "| oft | 0.005 | 0.40, 0.50, 0.60; **0.50** | 0.70 | 0.001: 0.50 |"
    assert report(lines).splitlines()[2:] == [row]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["tlora", "lokr", "oft"])
def test_a_new_name_is_learned_with_each_kind(tmp_path: Path, kind: str) -> None:
    scores = score_run(kind, RATES[kind][1], 0, tmp_path)
    assert scores["concept"] > 0.4
