"""A report's folder is current while its files are the ones that were recorded for the same content."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from pipeline.reporting.findings import Finding, write_findings
from pipeline.reporting.reports import forget_current, is_current, mark_current, write_report
from pipeline.reporting.summary import RunResult, run_summary
from tests.damage import DAMAGES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "thumbnails").mkdir()
    for name in ("a b.jpg", "buckets.parquet", "thumbnails/c.jpg"):
        (tmp_path / name).write_bytes(name.encode() * 50)
    mark_current(tmp_path, "one", "two")
    return tmp_path


def test_files_of_a_training_that_diverged_are_valid_json_and_summarized(tmp_path: Path) -> None:
    """Only Python's parser reads NaN and Infinity."""
    training = {"steps": 2, "first_loss": 0.5, "last_loss": math.nan, "launched": True}
    write_report(tmp_path, "trained_lora", {**training, "loss_curve": [[1, 0.5], [2, math.inf]]})
    finding = Finding(
        "loss_finite", False, "error", "step 2", "fix", [{"loss": math.nan}], {"worst": math.inf}
    )
    write_findings(tmp_path, "trained_lora", [finding])

    def refuse(name: str) -> None:
        raise AssertionError(name)

    report, checks = (
        json.loads((tmp_path / "reports" / f"{name}.json").read_text("utf-8"), parse_constant=refuse)
        for name in ("trained_lora", "trained_lora_checks")
    )
    assert (report["last_loss"], report["loss_curve"]) == (None, [[1, 0.5], [2, None]])
    assert (checks["checks"][0]["rows"], checks["checks"][0]["numbers"]) == (
        [{"loss": None}],
        {"worst": None},
    )
    text = run_summary(RunResult("flowers", tmp_path, {"trained_lora": report}, []))
    assert "loss 0.5000 (first) to not finite (last)" in text


def test_the_first_digests_decide(folder: Path) -> None:
    assert is_current(folder, "one", "two")
    assert is_current(folder, "one")
    assert not is_current(folder, "two")
    assert not is_current(folder, "one", "two", "three")
    forget_current(folder)
    assert not is_current(folder, "one")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["a b.jpg", "buckets.parquet", "thumbnails/c.jpg"])
def test_L07_a_damaged_file_is_deleted_so_that_it_is_drawn_again(
    folder: Path, name: str, damage: str
) -> None:
    DAMAGES[damage](folder / name)
    assert not is_current(folder, "one", "two")
    assert not (folder / name).exists()
    assert len([path for path in folder.rglob("*") if path.is_file()]) == 3


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_not_current_and_no_error(folder: Path, damage: str) -> None:
    DAMAGES[damage](folder / "made_for.txt")
    assert not is_current(folder, "one", "two")
    (folder / "made_for.txt").write_bytes(b"\xff\xfe\x00")
    assert not is_current(folder, "one", "two")


def test_a_record_of_an_earlier_release_has_digests_only(folder: Path) -> None:
    (folder / "made_for.txt").write_text("one")
    assert is_current(folder, "one")


def test_a_record_that_names_other_files_deletes_none(folder: Path, tmp_path: Path) -> None:
    other = tmp_path.with_name(f"{tmp_path.name}_other")
    other.write_text("kept")
    (folder / "made_for.txt").write_text(f"one two\n{'0' * 64} ../{other.name}\n{'0' * 64} thumbnails\n0\n")
    assert not is_current(folder, "one", "two")
    assert other.read_text() == "kept"
    assert (folder / "thumbnails" / "c.jpg").is_file()
