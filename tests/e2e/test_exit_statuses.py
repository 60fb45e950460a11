"""O02: the exit status and the last lines of the real command, for each way that a job can fail.

See also test_gates for a closed gate, test_commands for a broken recipe, and test_run_command for a good run.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from pipeline.trained_lora.run_folder import RunLayout
from tests.e2e.problems import Change, last_problem, problem_of
from tests.small_disk import on_small_disk

ENDLESS = {
    "steps": 100_000,
    "checkpoint_every": 50_000,
    "sample_every": 0,
    "batch_size": 2,
    "lora": {"rank": 2},
}


def job(workspace: Any, name: str = "train") -> Any:
    return workspace.dagster("job", "execute", "-m", "assets.definitions", "-j", f"small_{name}")


@pytest.mark.slow
def test_the_error_of_a_killed_trainer_names_its_signal(cached) -> None:
    cached.recipe(training=ENDLESS)
    running = cached.start("train")
    end_s = time.monotonic() + 120
    while not list(cached.out.glob("runs/*/logs/metrics.jsonl")):
        assert running.poll() is None, running.communicate()[1][-3000:]
        assert time.monotonic() < end_s
        time.sleep(0.05)
    # The process of pipeline/processes/fork_server.py, which has become the training.
    (trainer,) = [
        process
        for process in psutil.Process(running.pid).children(recursive=True)
        if process.cmdline()[1:2] == ["-m"]
    ]
    trainer.send_signal(signal.SIGKILL)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 1
    problem = last_problem(errors)
    assert problem.what.startswith("LaunchError: pipeline.trained_lora.worker ended by signal SIGKILL")
    assert "memory" in problem.fix


@pytest.mark.slow
def test_the_error_of_a_full_disk_names_the_path_that_could_not_be_written(cached) -> None:
    command = cached.command("job", "execute", "-m", "assets.definitions", "-j", "small_cache")
    problem = problem_of(cached.run(on_small_disk(str(cached.out), "24k", command)))
    assert "the disk is full" in problem.what
    assert str(cached.out) in problem.where
    assert "free" in problem.fix


SMALL_DISKS = {
    "for the tables": ("out", "8k"),
    "for the reports": ("out", "48k"),
    "for the checkpoints": ("out", "600k"),
    "for the entries": ("cache", "16k"),
}


@pytest.mark.slow
@pytest.mark.parametrize("disk", SMALL_DISKS)
def test_the_error_of_a_small_disk_names_its_folder(fresh, disk: str) -> None:
    folder, size = SMALL_DISKS[disk]
    (fresh.root / folder).mkdir()
    command = fresh.command("job", "execute", "-m", "assets.definitions", "-j", "small_train")
    problem = problem_of(fresh.run(on_small_disk(str(fresh.root / folder), size, command)))
    assert "the disk is full" in problem.what or "free for the missing entries" in problem.what
    assert str(fresh.root / folder) in problem.where + problem.what


@pytest.mark.slow
def test_the_error_of_a_full_disk_below_dagsters_history_names_dagster_home(cached) -> None:
    """Empty, its tables take 300 KB; on a smaller disk Dagster fails before it loads the definitions."""
    home = cached.root / "home"
    home.mkdir()
    command = [sys.executable, "-m", "assets.run", str(cached.file), "small_cache"]
    problem = problem_of(cached.run(on_small_disk(str(home), "460k", command), DAGSTER_HOME=str(home)))
    what, _, message = problem.what.partition(": ")
    assert what == "Dagster cannot write its history"
    assert message in {"database or disk is full", "disk I/O error"}, "messages of SQLite"
    assert str(home) in problem.where
    assert "free space" in problem.fix


@pytest.mark.slow
def test_a_full_disk_during_the_export_of_the_lora_repeats_no_training_step(cached) -> None:
    """The disk is full for the run's files after the last step, then for `lora/`, then it has room."""
    cached.recipe(training={**ENDLESS, "steps": 4, "checkpoint_every": 4})
    assert job(cached).returncode == 0
    [run] = (cached.out / "runs").iterdir()
    lora = cached.out / "lora"
    steps = (run / "logs" / "metrics.jsonl").read_text(encoding="utf-8")
    exported = {path.name: _tensors(path) for path in lora.glob("*.safetensors")}
    backup = cached.root / "backup"
    shutil.rmtree(run / "lora")
    RunLayout(run).finished.unlink()
    shutil.copytree(run, backup)
    command = cached.command("job", "execute", "-m", "assets.definitions", "-j", "small_train")
    filled = ["sh", "-c", 'cp -r "$1"/. "$2" && shift 2 && exec "$@"', "sh", str(backup), str(run), *command]
    problem = problem_of(cached.run(on_small_disk(str(run), f"{_kib(backup) + 16}k", filled)))
    assert "the disk is full" in problem.what
    assert str(run / "lora") in problem.where
    shutil.rmtree(lora)
    lora.mkdir()
    problem = problem_of(cached.run(on_small_disk(str(lora), "16k", command)))
    assert "the disk is full" in problem.what
    assert str(lora) in problem.where
    assert job(cached).returncode == 0
    assert (run / "logs" / "metrics.jsonl").read_text(encoding="utf-8") == steps
    assert {path.name: _tensors(path) for path in lora.glob("*.safetensors")} == exported


def _tensors(file: Path) -> bytes:
    """Return the tensors of a safetensors file; the order of its header's metadata varies."""
    data = file.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


def _kib(folder: Path) -> int:
    """Return the KiB that the files of a folder take on a tmpfs with pages of 4 KiB."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return sum(-(-size // 4096) * 4 for size in sizes)


def empty_folder(workspace: Any) -> None:
    for path in workspace.data.iterdir():
        path.unlink()


def missing_folder(workspace: Any) -> None:
    workspace.data.rename(workspace.root / "moved")


def file_for_folder(workspace: Any) -> None:
    missing_folder(workspace)
    workspace.data.write_text("a file", encoding="utf-8")


def broken_link(workspace: Any) -> None:
    missing_folder(workspace)
    workspace.data.symlink_to(workspace.root / "nowhere")


def names_that_differ_in_case(workspace: Any) -> None:
    Image.new("RGB", (96, 96)).save(workspace.data / "Photo1.png")
    (workspace.data / "Photo1.txt").write_text("another", encoding="utf-8")


def shared_caption(workspace: Any) -> None:
    Image.new("RGB", (96, 96), "red").save(workspace.data / "photo1.webp")


def broken_image(workspace: Any) -> None:
    path = workspace.data / "photo1.png"
    path.write_bytes(path.read_bytes()[:2000])


def overlapping_paths(workspace: Any) -> None:
    workspace.recipe(cache_dir=str(workspace.data / "cache"))


def unfilled_batches(workspace: Any) -> None:
    workspace.recipe(
        buckets={"resolution": 64, "step": 8, "underfilled": "drop"}, training={"steps": 4, "batch_size": 64}
    )


def diverging(workspace: Any) -> None:
    workspace.recipe(training={"steps": 6, "batch_size": 2, "learning_rate": 1e30, "sample_every": 0})


def no_model(workspace: Any) -> None:
    workspace.recipe(model={"base": str(workspace.root / "no-model")})


def other_family(workspace: Any) -> None:
    folder = workspace.root / "odd-model"
    folder.mkdir()
    (folder / "model_index.json").write_text('{"_class_name": "OddPipeline"}', encoding="utf-8")
    workspace.recipe(model={"base": str(folder)})


FAILURES: dict[str, tuple[Change, str]] = {
    "images_found": (empty_folder, "images_found"),
    "the dataset is missing": (missing_folder, "DatasetError"),
    "the dataset is a file": (file_for_folder, "Error"),
    "the dataset is a broken link": (broken_link, "DatasetError"),
    "names_distinct": (names_that_differ_in_case, "names_distinct"),
    "captions_present": (lambda w: (w.data / "photo1.txt").unlink(), "captions_present"),
    "captions_empty": (lambda w: (w.data / "photo1.txt").write_text(" \n"), "captions_present"),
    "captions_decodable": (
        lambda w: (w.data / "photo1.txt").write_bytes(b"\xff\xfe\xfd"),
        "captions_decodable",
    ),
    "captions_unshared": (shared_caption, "captions_unshared"),
    "rejected_fraction": (broken_image, "rejected_fraction"),
    "path_isolation": (overlapping_paths, "PathIsolationError"),
    "batches_possible": (unfilled_batches, "batches_possible"),
    "the loss is NaN": (diverging, "TrainingError"),
    "the model is missing": (no_model, "ModelError"),
    "the model has an unsupported family": (other_family, "FamilyError"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAILURES)
def test_each_failure_of_the_job_ends_with_its_cause(cached, kind: str) -> None:
    change, expected = FAILURES[kind]
    change(cached)
    problem = problem_of(job(cached))
    assert expected in problem.what
    assert not (cached.out / "lora").exists()


@pytest.mark.slow
def test_the_error_of_an_unknown_job_lists_the_jobs(fresh) -> None:
    completed = job(fresh, "trian")
    assert completed.returncode == 2
    [last] = completed.stderr.rstrip().splitlines()[-1:]
    assert last.startswith("Error: ")
    assert "small_trian" in last
    assert "small_train'" in last
