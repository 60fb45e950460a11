"""The published settings of `latentline new --preset`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PRESETS = tomllib.loads((ROOT / "pipeline" / "new_recipe" / "presets.toml").read_text("utf-8"))["presets"]


def _row(preset: Any) -> str:
    settings, source = preset["settings"], preset["source"].partition(",")[0]
    steps = f"{settings['training.steps']:,}" if "training.steps" in settings else "as without"
    steps += f" x {settings['training.gradient_accumulation']}"
    rank, rate = settings.get("training.lora.rank", ""), settings["training.learning_rate"]
    goals = ", ".join(preset["goals"])
    return f"| {preset['family']} | {goals} | {rank} | {rate:g} | {steps} | {source} |"


def test_the_questions_list_every_preset_with_its_settings() -> None:
    text = (ROOT / "docs" / "faq.md").read_text("utf-8")
    table = text.partition("<!-- presets: begin -->")[2].partition("<!-- presets: end -->")[0]
    assert table.split("\n")[4:-2] == [_row(preset) for preset in PRESETS]
