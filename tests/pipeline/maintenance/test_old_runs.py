"""Run folders: the needed ones are kept for a stated reason, and deleting one is safe at any point."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import TrainingError
from pipeline.maintenance.old_runs import (
    Run,
    delete_run,
    delete_run_folder,
    delete_state,
    survey_runs,
)
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.storage.atomic import temp_name
from pipeline.storage.tables import Tables, frame
from pipeline.trained_lora.job import JOB_FILE
from pipeline.trained_lora.run_folder import RunLayout, hold_run, hold_training

FINISHED, PUBLISHED, NEWEST, OTHER = ("1" * 16, "2" * 16, "3" * 16, "4" * 16)


@pytest.fixture
def output_dir(tmp_path: Path) -> Path:
    """Return an output folder with four runs, of which OTHER changed first and NEWEST last."""
    output = tmp_path / "out"
    for number, name in enumerate((OTHER, FINISHED, PUBLISHED, NEWEST)):
        add_run(output, name, changed_s=1_000_000_000 + 1000 * number)
    (output / "lora").mkdir()
    (output / "lora" / "provenance.json").write_text(json.dumps({"run": PUBLISHED}))
    return output


def add_run(output: Path, name: str, *, changed_s: float) -> None:
    layout = RunLayout(output / "runs" / name)
    checkpoint = layout.checkpoints / "step-00000250"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").write_text("{}")
    (checkpoint / "optimizer.pt").write_bytes(b"x" * 1000)
    layout.facts.write_text("{}")
    (layout.exported).mkdir()
    (layout.exported / "pytorch_lora_weights.safetensors").write_bytes(b"x" * 100)
    if name == FINISHED:
        layout.finished.write_text(json.dumps({"steps": 1500}))
    set_times(layout.folder, changed_s)


def set_times(folder: Path, changed_s: float) -> None:
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (changed_s, changed_s))


def recipe(output: Path, name: str = "flowers", **lora: Any) -> Recipe:
    return recipe_from_mapping(
        name,
        {
            "datasets": [{"name": "d", "path": str(output.parent / "photos")}],
            "cache_dir": str(output.parent / "cache"),
            "output_dir": str(output),
            "model": {"base": "a/b"},
            "training": {"lora": lora},
        },
    )


def kept(output: Path, *recipes: Recipe, num_newest: int = 0) -> dict[str, str]:
    survey = survey_runs(output, num_newest=num_newest, recipes=recipes)
    return {run.folder.name: run.kept for run in survey.runs}


def test_runs_are_listed_from_the_newest_with_size_and_state(output_dir: Path) -> None:
    runs = survey_runs(output_dir, num_newest=0, recipes=[]).runs
    assert [run.folder.name for run in runs] == [NEWEST, PUBLISHED, FINISHED, OTHER]
    assert {run.num_bytes for run in runs if run.folder.name != FINISHED} == {1000 + 100 + 2 + 2}
    assert [run.state for run in runs[2:]] == [
        "finished at step 1,500",
        "unfinished, resumes from step 250",
    ]


def test_the_newest_and_the_published_run_are_kept(output_dir: Path) -> None:
    assert kept(output_dir) == {NEWEST: "", PUBLISHED: "in lora/", FINISHED: "", OTHER: ""}
    assert kept(output_dir, num_newest=3) == {
        NEWEST: "newest",
        PUBLISHED: "in lora/",
        FINISHED: "newest",
        OTHER: "",
    }


def test_a_run_with_an_exported_step_is_kept(output_dir: Path) -> None:
    record = output_dir / "runs" / "exported_step.json"
    record.write_text(json.dumps({"run": OTHER, "step": 250}))
    assert kept(output_dir)[OTHER] == "exported to lora/"


def test_all_runs_are_kept_if_lora_does_not_name_its_run(output_dir: Path) -> None:
    (output_dir / "lora" / "provenance.json").write_text("torn")
    assert set(kept(output_dir).values()) == {"lora/provenance.json does not name its run"}


def test_a_run_that_a_recipe_starts_from_is_kept_also_through_a_link(
    output_dir: Path, tmp_path: Path
) -> None:
    file = output_dir / "runs" / OTHER / "lora" / "pytorch_lora_weights.safetensors"
    link = tmp_path / "link.safetensors"
    link.symlink_to(file)
    for start in (file, link):
        other = recipe(tmp_path / "elsewhere", "birds", start_from=str(start))
        assert kept(output_dir, recipe(output_dir), other)[OTHER] == "start_from of birds"


def test_a_run_in_training_and_the_run_that_it_starts_from_are_kept(output_dir: Path) -> None:
    start = output_dir / "runs" / OTHER / "lora" / "pytorch_lora_weights.safetensors"
    training = RunLayout(output_dir / "runs" / FINISHED)
    (training.folder / JOB_FILE).write_text(
        json.dumps({"recipe": {"training": {"lora": {"start_from": str(start)}}}})
    )
    assert kept(output_dir)[OTHER] == ""
    with hold_run(training, print):
        reasons = kept(output_dir)
    assert (reasons[FINISHED], reasons[OTHER]) == ("being trained", f"start_from of run {FINISHED}")
    assert kept(output_dir)[FINISHED] == ""


def test_links_and_folders_with_other_names_are_never_listed(output_dir: Path, tmp_path: Path) -> None:
    runs = output_dir / "runs"
    (runs / "0 notes.txt").write_text("mine")
    (runs / "my best run").mkdir()
    (runs / "my best run" / "run.json").write_text("{}")
    (runs / ("5" * 16)).mkdir()
    (runs / ("6" * 16)).symlink_to(runs / OTHER)
    assert set(kept(output_dir)) == {FINISHED, PUBLISHED, NEWEST, OTHER}
    assert survey_runs(tmp_path / "none", num_newest=0, recipes=[]).runs == []


def old_run(output_dir: Path, name: str) -> Run:
    survey = survey_runs(output_dir, num_newest=0, recipes=[])
    return next(run for run in survey.old if run.folder.name == name)


def test_a_deleted_run_leaves_nothing(output_dir: Path) -> None:
    delete_run(old_run(output_dir, OTHER).folder)
    assert {path.name for path in (output_dir / "runs").iterdir()} == {FINISHED, PUBLISHED, NEWEST}


def test_a_run_that_is_published_or_trained_after_the_listing_is_not_deleted(output_dir: Path) -> None:
    run = old_run(output_dir, OTHER)
    for hold in (hold_run(RunLayout(run.folder), print), hold_training(RunLayout(run.folder))):
        start_s = time.monotonic()
        with hold, pytest.raises(TrainingError, match="being trained"):
            delete_run(run.folder)
        assert time.monotonic() - start_s < 10, "it waits for the end of the training"
    (output_dir / "lora" / "provenance.json").write_text(json.dumps({"run": OTHER}))
    with pytest.raises(TrainingError, match="needed now, after it was listed as old: in lora/"):
        delete_run(run.folder)
    assert kept(output_dir)[OTHER] == "in lora/"
    assert survey_runs(output_dir, num_newest=0, recipes=[]).runs[-1] == replace(run, kept="in lora/")


def test_a_folder_that_an_interrupted_deletion_left_is_not_a_run(output_dir: Path) -> None:
    leftover = output_dir / "runs" / temp_name()
    (output_dir / "runs" / OTHER).rename(leftover)
    survey = survey_runs(output_dir, num_newest=0, recipes=[])
    assert OTHER not in {run.folder.name for run in survey.runs}
    assert survey.leftovers == {leftover: 1000 + 100 + 2 + 2}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may delete any file")
def test_a_run_that_cannot_be_deleted_is_an_error_with_its_path(output_dir: Path) -> None:
    (output_dir / "runs").chmod(0o500)
    try:
        with pytest.raises(TrainingError, match="a run folder cannot be deleted: Permission denied"):
            delete_run(old_run(output_dir, OTHER).folder)
    finally:
        (output_dir / "runs").chmod(0o700)
    assert old_run(output_dir, OTHER).num_bytes == 1104


def test_a_run_without_a_checkpoint_is_unfinished(output_dir: Path) -> None:
    shutil.rmtree(output_dir / "runs" / OTHER / "checkpoints")
    set_times(output_dir / "runs" / OTHER, 0)
    run = survey_runs(output_dir, num_newest=0, recipes=[]).runs[-1]
    assert (run.folder.name, run.state, run.changed_s) == (OTHER, "unfinished", 0.0)


def test_locks_and_links_count_neither_as_size_nor_as_a_change(output_dir: Path) -> None:
    before = old_run(output_dir, OTHER)
    layout = RunLayout(before.folder)
    for lock in (layout.lock, layout.training_lock):
        lock.write_bytes(b"x" * 50)
    (layout.folder / "link").symlink_to(layout.facts)
    assert old_run(output_dir, OTHER) == before


@pytest.mark.parametrize("lora", ["missing", "empty", "of another run", "of no run"])
def test_an_output_folder_that_publishes_no_run_keeps_none(output_dir: Path, lora: str) -> None:
    shutil.rmtree(output_dir / "lora")
    if lora != "missing":
        (output_dir / "lora").mkdir()
    if lora.startswith("of"):
        facts = {"run": "5" * 16} if lora == "of another run" else []
        (output_dir / "lora" / "provenance.json").write_text(json.dumps(facts))
    reason = "lora/provenance.json does not name its run" if lora == "of no run" else ""
    assert set(kept(output_dir).values()) == {reason}


def test_an_interrupted_deletion_leaves_a_folder_without_locks(
    output_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that waits for a lock of the run would otherwise hold a file that is no lock any more."""

    def interrupt(_: Path) -> None:
        raise OSError("interrupted")

    monkeypatch.setattr(shutil, "rmtree", interrupt)
    with pytest.raises(TrainingError, match="a run folder cannot be deleted: interrupted"):
        delete_run(output_dir / "runs" / OTHER)
    survey = survey_runs(output_dir, num_newest=0, recipes=[])
    (leftover,) = survey.leftovers
    assert OTHER not in {run.folder.name for run in survey.runs}
    layout = RunLayout(leftover)
    assert layout.facts.exists()
    assert not layout.lock.exists()
    assert not layout.training_lock.exists()


def test_a_run_folder_without_locks_is_deleted_and_a_missing_one_is_an_error(output_dir: Path) -> None:
    folder = output_dir / "runs" / OTHER
    delete_run_folder(folder)
    assert not folder.exists()
    assert survey_runs(output_dir, num_newest=0, recipes=[]).leftovers == {}
    with pytest.raises(TrainingError, match="a run folder cannot be deleted: No such file or directory"):
        delete_run_folder(folder)


def test_variants_of_the_last_sweep_keep_their_lora_and_lose_the_state_to_resume(output_dir: Path) -> None:
    rows: list[dict[str, Any]] = [
        {
            "variant": number,
            "seed": 1,
            "overrides": "{}",
            "run": run,
            "step": step,
            **dict.fromkeys(("score", "behind", "low", "high"), 0.0),
            "promoted": promoted,
            "steps": step,
            "error": None,
        }
        for number, run, step, promoted in (
            (1, FINISHED, 250, True),
            (1, FINISHED, 1500, True),
            (2, OTHER, 250, True),
            (2, OTHER, 500, False),
        )
    ]
    Tables(output_dir).write("sweep", frame("sweep", rows))
    assert kept(output_dir) == {
        NEWEST: "",
        PUBLISHED: "in lora/",
        FINISHED: "winner of the sweep",
        OTHER: "",
    }
    (loser,) = [run for run in survey_runs(output_dir, num_newest=0, recipes=[]).old if run.keeps_lora]
    assert (loser.folder.name, loser.num_bytes) == (OTHER, 1000 + 2)
    with hold_run(RunLayout(loser.folder), str), pytest.raises(TrainingError, match="is being trained"):
        delete_state(loser.folder)
    delete_state(loser.folder)
    files = {path.name for path in loser.folder.rglob("*") if path.is_file()} - {"lock", "training.lock"}
    assert files == {"run.json", "pytorch_lora_weights.safetensors"}
    assert kept(output_dir)[OTHER] == "variant of the sweep, without state"
