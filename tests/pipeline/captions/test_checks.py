from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pipeline.captions.checks import has_loop, judged, run
from pipeline.recipe import recipe_from_mapping
from pipeline.reporting.findings import CheckContext, Finding
from pipeline.storage.tables import Tables


def found(
    folder: Path, texts: list[str], *, cut: bool = False, refused: Sequence[tuple[str, str]] = ()
) -> dict[str, Finding]:
    values: dict[str, Any] = {
        "datasets": [
            {"name": "photos", "path": str(folder), "captions": {"from": "model", "model": "owner/name"}}
        ],
        "output_dir": str(folder / "output"),
        "model": {"base": "owner/name"},
    }
    recipe, tables = recipe_from_mapping("x", values), Tables(folder / "output")
    table = pl.DataFrame(
        {
            "sample_id": [f"photos/{number}.png" for number in range(len(texts))],
            "caption": texts,
            "cut": [cut] * len(texts),
        }
    )
    report = {"samples": len(texts), **judged(table, refused)}
    return {each.name: each for each in run(CheckContext(recipe, tables, {"captions": report}))}


def test_readable_captions_pass_all_checks(tmp_path: Path) -> None:
    assert all(each.passed for each in found(tmp_path, ["a red rose on a table"]).values())


@pytest.mark.parametrize("text", ["", "<think>", "\u200b"])
def test_C16_an_unreadable_caption_closes_the_gate(tmp_path: Path, text: str) -> None:
    finding = found(tmp_path, ["a rose", text])["captions_readable"]
    assert finding.closes
    assert "photos/1.png" in finding.summary


def test_C16_an_image_that_the_processor_refuses_closes_the_gate(tmp_path: Path) -> None:
    finding = found(tmp_path, ["a rose"], refused=[("photos/9.png", "absolute aspect ratio")])[
        "captions_readable"
    ]
    assert finding.closes
    assert finding.rows == [{"sample_id": "photos/9.png", "what": "absolute aspect ratio"}]


def test_C16_a_caption_that_was_cut_off_or_repeats_itself_is_a_warning(tmp_path: Path) -> None:
    findings = found(tmp_path, ["a rose " * 9], cut=True)
    for name in ("captions_complete", "captions_looping"):
        assert not findings[name].passed
        assert not findings[name].closes


def test_a_loop_is_a_passage_that_follows_itself() -> None:
    assert has_loop("a cat, a cat, a cat, a cat")
    assert has_loop("red red red red red red")
    assert has_loop("It shows the sea. The sky is blue. The sky is blue. The sky is blue. The sky is blue.")
    assert not has_loop("a very very very very old house")
    assert not has_loop("a cat on a mat, a cat on a hat, a cat in a box, and a dog")
    assert not has_loop("")


def test_a_missing_report_closes_the_gate(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "datasets": [{"name": "p", "path": str(tmp_path), "captions": {"from": "model", "model": "o/n"}}],
        "output_dir": str(tmp_path / "output"),
        "model": {"base": "owner/name"},
    }
    context = CheckContext(recipe_from_mapping("x", values), Tables(tmp_path / "output"))
    assert [each.name for each in run(context) if each.closes] == ["captions_readable"]
