"""The study of adapter kinds: its recipes are valid, and its table names the best rate of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from demo.adapter_kinds import KINDS, RATES, best_rate, report, study_recipe


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_trains_the_same_layers(tmp_path: Path, kind: str) -> None:
    recipe = study_recipe(kind, RATES[kind][0], 3, tmp_path, cache=tmp_path / "cache")
    lora = recipe.training.lora
    assert (lora.targets, lora.conv_rank, lora.text_encoders) == ("blocks", None, None)
    assert (recipe.training.seed, recipe.training.learning_rate) == (3, RATES[kind][0])


def line(kind: str, rate: float, seed: int, concept: float, known: float) -> dict[str, Any]:
    return {"kind": kind, "rate": rate, "seed": seed, "concept_after": concept, "known_after": known}


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
