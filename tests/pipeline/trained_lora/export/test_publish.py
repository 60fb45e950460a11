from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import TrainingError
from pipeline.storage.atomic import temp_name
from pipeline.trained_lora.export.lora_files import LAYOUTS, layout_file
from pipeline.trained_lora.export.publish import (
    accept_result,
    companion_hashes,
    damaged_companions,
    mark_finished,
    mirror_folder,
    publish,
    publish_files,
    read_finished,
)
from pipeline.trained_lora.run_folder import RunLayout

NAMES = [layout_file(layout, "demo") for layout in LAYOUTS]
OTHER_NAMES = [layout_file(layout, "other") for layout in LAYOUTS]
COMPANIONS = ["provenance.json", "samples.parquet", "README.md"]
RESULT: dict[str, Any] = {
    "run": "abc",
    "steps": 6,
    "output_change": 0.5,
    "loss_trend": None,
    "files": [{"name": name, "max_error": 0.0} for name in NAMES],
}


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    """A run of 6 steps with its exported files and the worker's result."""
    layout = RunLayout(tmp_path / "abc")
    layout.exported.mkdir(parents=True)
    for name in (*NAMES, *COMPANIONS):
        (layout.exported / name).write_text(f"content of {name}")
    layout.result.write_text(json.dumps(RESULT))
    return layout


def accepted(layout: RunLayout) -> dict[str, Any]:
    return accept_result(layout, run="abc", steps=6, names=NAMES)


def finished(layout: RunLayout) -> dict[str, Any] | None:
    return read_finished(layout, steps=6, names=NAMES)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_result_is_accepted_with_the_size_and_hash_of_each_file(layout: RunLayout) -> None:
    files = [
        {"name": name, "max_error": 0.0, "bytes": 11 + len(name), "sha256": sha256(f"content of {name}")}
        for name in NAMES
    ]
    assert accepted(layout) == {**RESULT, "files": files}


def without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda result: {name: value for name, value in result.items() if name != key}


UNUSABLE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another run": lambda result: {**result, "run": "other"},
    "another plan": lambda result: {**result, "steps": 7},
    "another recipe": lambda result: {**result, "files": [{"name": name.upper()} for name in NAMES]},
    "other files in the place of some": lambda result: {**result, "files": result["files"][:-1]},
    "no run": without("run"),
    "no files": without("files"),
    "no object": lambda result: [result],
    "no list": lambda result: {**result, "files": None},
}


@pytest.mark.parametrize("defect", UNUSABLE)
def test_a_result_that_does_not_belong_to_the_run_is_an_error(layout: RunLayout, defect: str) -> None:
    layout.result.write_text(json.dumps(UNUSABLE[defect](RESULT)))
    with pytest.raises(TrainingError, match="without a usable result"):
        accepted(layout)


def test_a_result_that_is_missing_or_torn_is_an_error(layout: RunLayout) -> None:
    layout.result.write_text("{")
    with pytest.raises(TrainingError, match="without a usable result"):
        accepted(layout)
    layout.result.unlink()
    with pytest.raises(TrainingError, match="without a usable result"):
        accepted(layout)


@pytest.mark.parametrize("name", NAMES)
def test_a_result_whose_file_is_missing_is_an_error_that_names_the_file(layout: RunLayout, name: str) -> None:
    (layout.exported / name).unlink()
    with pytest.raises(TrainingError, match=f"{name} is missing"):
        accepted(layout)


def test_a_finished_run_reads_back_only_for_its_steps_and_recipe(layout: RunLayout) -> None:
    assert finished(layout) is None
    mark_finished(layout, accepted(layout))
    assert finished(layout) == accepted(layout)
    assert read_finished(layout, steps=7, names=NAMES) is None
    assert read_finished(layout, steps=6, names=OTHER_NAMES) is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda path: path.write_text("torn")], ids=["missing", "torn"]
)
def test_a_run_with_a_missing_or_changed_lora_file_is_not_finished(
    layout: RunLayout, name: str, damage: Callable[[Path], Any]
) -> None:
    mark_finished(layout, accepted(layout))
    damage(layout.exported / name)
    assert finished(layout) is None


@pytest.mark.parametrize("value", [0.75, None, "0.5"])
def test_a_record_with_another_value_is_not_that_of_a_finished_run(layout: RunLayout, value: Any) -> None:
    mark_finished(layout, accepted(layout))
    record = json.loads(layout.finished.read_text())
    layout.finished.write_text(json.dumps({**record, "output_change": value}))
    assert finished(layout) is None


def test_a_record_of_an_earlier_release_has_no_hash_of_its_own(layout: RunLayout) -> None:
    layout.finished.write_text(json.dumps(accepted(layout)))
    assert finished(layout) == accepted(layout)


def test_each_companion_that_differs_from_the_record_is_damaged(layout: RunLayout) -> None:
    result = {**accepted(layout), "companions": companion_hashes(layout.exported)}
    assert damaged_companions(layout, result) == []
    (layout.exported / "README.md").write_text("content of README.me")
    (layout.exported / "samples.parquet").unlink()
    (layout.exported / "samples.jpg").write_bytes(b"a picture of another run")
    assert damaged_companions(layout, result) == ["samples.parquet", "samples.jpg", "README.md"]

    # Runs of earlier releases recorded none, so each file may be damaged.
    del result["companions"]
    assert damaged_companions(layout, result) == [
        "samples.parquet",
        "samples.jpg",
        "README.md",
        "provenance.json",
    ]


@pytest.mark.parametrize("key", ["steps", "files", "output_change", "loss_trend"])
def test_a_marker_that_lacks_a_key_is_not_that_of_a_finished_run(layout: RunLayout, key: str) -> None:
    mark_finished(layout, without(key)(accepted(layout)))
    assert finished(layout) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"steps": 6, "files": [1]}'])
def test_a_damaged_marker_is_not_that_of_a_finished_run(layout: RunLayout, text: str) -> None:
    mark_finished(layout, accepted(layout))
    layout.finished.write_text(text)
    assert finished(layout) is None


def test_only_files_that_differ_are_published_and_the_provenance_is_the_last(
    layout: RunLayout, tmp_path: Path
) -> None:
    result, lora = accepted(layout), tmp_path / "lora"
    order = [*NAMES, "samples.parquet", "README.md", "provenance.json"]
    assert publish(layout, lora, result) == order
    assert {path.name: path.read_text() for path in lora.iterdir()} == {
        name: f"content of {name}" for name in order
    }
    assert publish(layout, lora, result) == []
    (lora / "README.md").write_text("changed")
    (lora / NAMES[1]).unlink()
    assert publish(layout, lora, result) == [NAMES[1], "README.md"]


def test_a_sheet_of_previews_is_published_and_one_of_another_run_is_removed(
    layout: RunLayout, tmp_path: Path
) -> None:
    result, lora, sheet = accepted(layout), tmp_path / "lora", layout.exported / "samples.jpg"
    publish(layout, lora, result)
    sheet.write_bytes(b"picture")
    assert publish(layout, lora, result) == ["samples.jpg"]
    assert (lora / "samples.jpg").read_bytes() == b"picture"
    sheet.unlink()
    assert publish(layout, lora, result) == []
    assert not (lora / "samples.jpg").exists()


def test_a_missing_file_other_than_the_sheet_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        publish_files({"README.md": tmp_path / "missing"}, tmp_path / "lora")


def test_a_mirrored_folder_holds_exactly_the_files_of_its_source(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "a").write_text("first")
    (source / "b").write_text("second")
    mirror_folder(source, target)
    times = {path.name: path.stat().st_mtime_ns for path in target.iterdir()}
    (target / "other").write_text("third")
    (target / "a").write_text("changed")
    mirror_folder(source, target)
    assert {path.name: path.read_text() for path in target.iterdir()} == {"a": "first", "b": "second"}
    assert (target / "b").stat().st_mtime_ns == times["b"], "an equal file is not written again"

    mirror_folder(tmp_path / "missing", target)
    assert list(target.iterdir()) == []
    mirror_folder(tmp_path / "missing", tmp_path / "also missing")
    assert not (tmp_path / "also missing").exists()


def test_a_temporary_file_of_a_killed_process_is_removed_from_lora(layout: RunLayout, tmp_path: Path) -> None:
    result, lora = accepted(layout), tmp_path / "lora"
    publish(layout, lora, result)
    published = sorted(lora.iterdir())
    (lora / temp_name()).write_bytes(b"half of a LoRA")
    (lora / "notes.tmp").write_text("of a person")
    assert publish(layout, lora, result) == []
    assert sorted(lora.iterdir()) == sorted([*published, lora / "notes.tmp"])
