"""O02: what `$?` is, and what is read last, for each way that the job can end; each by running the command.

A closed gate, a broken recipe and a good run stand in test_gates, test_commands and test_processes too.
"""

from __future__ import annotations

import json
import shutil
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from pipeline.trained_lora.run_folder import RunLayout
from tests.e2e.words import Change, last_words, refused
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


def test_a_killed_trainer_is_named_with_its_signal(cached) -> None:
    cached.recipe(training=ENDLESS)
    running = cached.start("train")
    end_s = time.monotonic() + 120
    while not list(cached.out.glob("runs/*/logs/metrics.jsonl")):
        assert running.poll() is None, running.communicate()[1][-3000:]
        assert time.monotonic() < end_s
        time.sleep(0.05)
    [trainer] = [
        each
        for each in psutil.Process(running.pid).children(recursive=True)
        if each.cmdline()[1:3] != ["-m", "pipeline.processes.worker.accelerate_launch"]
        and each.cmdline()[1:2] == ["-m"]
    ]
    trainer.send_signal(signal.SIGKILL)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 1
    words = last_words(errors)
    assert words.what.startswith("LaunchError: pipeline.trained_lora.worker ended by signal SIGKILL")
    assert "memory" in words.fix


def test_a_full_disk_is_named_with_the_path_that_could_not_be_written(cached) -> None:
    command = cached.command("job", "execute", "-m", "assets.definitions", "-j", "small_cache")
    words = refused(cached.run(on_small_disk(str(cached.out), "24k", command)))
    assert "the disk is full" in words.what
    assert str(cached.out) in words.where
    assert "free" in words.fix


SMALL_DISKS = {
    "for the tables": ("out", "8k"),
    "for the reports": ("out", "48k"),
    "for the checkpoints": ("out", "600k"),
    "for the entries": ("cache", "16k"),
}


@pytest.mark.slow
@pytest.mark.parametrize("disk", SMALL_DISKS)
def test_a_disk_too_small(fresh, disk: str) -> None:
    folder, size = SMALL_DISKS[disk]
    (fresh.root / folder).mkdir()
    command = fresh.command("job", "execute", "-m", "assets.definitions", "-j", "small_train")
    words = refused(fresh.run(on_small_disk(str(fresh.root / folder), size, command)))
    assert "the disk is full" in words.what or "the missing entries need" in words.what
    assert str(fresh.root / folder) in words.where + words.what


@pytest.mark.slow
def test_a_disk_too_small_for_dagsters_own_history(cached) -> None:
    """Its empty tables take 300 KB; on a disk below that Dagster ends before it reads anything of ours."""
    home = cached.root / "home"
    home.mkdir()
    command = cached.command("job", "execute", "-m", "assets.definitions", "-j", "small_cache")
    words = refused(cached.run(on_small_disk(str(home), "460k", command), DAGSTER_HOME=str(home)))
    what, _, said = words.what.partition(": ")
    assert what == "Dagster cannot write its history"
    assert said in {"database or disk is full", "disk I/O error"}, "SQLite's words where it could not grow"
    assert str(home) in words.where
    assert "free space" in words.fix


@pytest.mark.slow
def test_a_disk_that_is_full_when_the_lora_is_exported_costs_no_training(cached) -> None:
    """Full for the run's own files after the last step, then for `lora/`; with room, no step is repeated."""
    cached.recipe(training={**ENDLESS, "steps": 4, "checkpoint_every": 4})
    assert job(cached).returncode == 0
    [run] = (cached.out / "runs").iterdir()
    lora = cached.out / "lora"
    steps = (run / "logs" / "metrics.jsonl").read_text(encoding="utf-8")
    exported = {path.name: _tensors(path) for path in lora.glob("*.safetensors")}
    kept = cached.root / "kept"
    shutil.rmtree(run / "lora")
    RunLayout(run).finished.unlink()
    shutil.copytree(run, kept)
    command = cached.command("job", "execute", "-m", "assets.definitions", "-j", "small_train")
    filled = ["sh", "-c", 'cp -r "$1"/. "$2" && shift 2 && exec "$@"', "sh", str(kept), str(run), *command]
    full = refused(cached.run(on_small_disk(str(run), f"{_kib(kept) + 16}k", filled)))
    assert "the disk is full" in full.what
    assert str(run / "lora") in full.where
    shutil.rmtree(lora)
    lora.mkdir()
    full = refused(cached.run(on_small_disk(str(lora), "16k", command)))
    assert "the disk is full" in full.what
    assert str(lora) in full.where
    assert job(cached).returncode == 0
    assert (run / "logs" / "metrics.jsonl").read_text(encoding="utf-8") == steps
    assert {path.name: _tensors(path) for path in lora.glob("*.safetensors")} == exported


def _tensors(file: Path) -> bytes:
    """All of a safetensors file but its header, whose metadata comes in any order."""
    whole = file.read_bytes()
    return whole[8 + int.from_bytes(whole[:8], "little") :]


def _kib(folder: Path) -> int:
    """What the files of a folder take on a tmpfs, whose pages are 4 KiB."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return sum(-(-size // 4096) * 4 for size in sizes)


def empty(workspace: Any) -> None:
    for path in workspace.data.iterdir():
        path.unlink()


def gone(workspace: Any) -> None:
    workspace.data.rename(workspace.root / "elsewhere")


def a_file(workspace: Any) -> None:
    gone(workspace)
    workspace.data.write_text("no folder", encoding="utf-8")


def dangling(workspace: Any) -> None:
    gone(workspace)
    workspace.data.symlink_to(workspace.root / "nowhere")


def same_but_for_case(workspace: Any) -> None:
    Image.new("RGB", (96, 96)).save(workspace.data / "Photo1.png")
    (workspace.data / "Photo1.txt").write_text("another", encoding="utf-8")


def shared_caption(workspace: Any) -> None:
    Image.new("RGB", (96, 96), "red").save(workspace.data / "photo1.webp")


def broken_image(workspace: Any) -> None:
    path = workspace.data / "photo1.png"
    path.write_bytes(path.read_bytes()[:2000])


def isolation(workspace: Any) -> None:
    workspace.recipe(cache_dir=str(workspace.data / "cache"))


def too_few(workspace: Any) -> None:
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


CLOSED: dict[str, tuple[Change, str]] = {
    "images_found": (empty, "images_found"),
    "the dataset is gone": (gone, "DatasetError"),
    "the dataset is a file": (a_file, "Error"),
    "the dataset is a dead link": (dangling, "DatasetError"),
    "names_distinct": (same_but_for_case, "names_distinct"),
    "captions_present": (lambda w: (w.data / "photo1.txt").unlink(), "captions_present"),
    "captions_empty": (lambda w: (w.data / "photo1.txt").write_text(" \n"), "captions_present"),
    "captions_decodable": (
        lambda w: (w.data / "photo1.txt").write_bytes(b"\xff\xfe\xfd"),
        "captions_decodable",
    ),
    "captions_unshared": (shared_caption, "captions_unshared"),
    "rejected_fraction": (broken_image, "rejected_fraction"),
    "path_isolation": (isolation, "PathIsolationError"),
    "batches_possible": (too_few, "batches_possible"),
    "the loss is no number": (diverging, "TrainingError"),
    "no model": (no_model, "ModelError"),
    "a model of another family": (other_family, "FamilyError"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CLOSED)
def test_each_refusal_of_the_job(cached, kind: str) -> None:
    change, named = CLOSED[kind]
    change(cached)
    words = refused(job(cached))
    assert named in words.what
    assert not (cached.out / "lora").exists()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def header_of_another_kind(path: Path) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = data[8 : 8 + length].replace(b'"F16"', b'"I16"')
    path.write_bytes(data[:8] + header + data[8 + length :])


def other_content(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2:] = b"\x00\x7e"
    path.write_bytes(bytes(data))


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "completeness"),
    "cut short": (cut, "file_size_outliers"),
    "of another kind": (header_of_another_kind, "shape_uniformity"),
    "of other content": (other_content, "finite_values"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["latents", "text"])
@pytest.mark.parametrize("damage", DAMAGED)
def test_O10_training_alone_refuses_a_damaged_entry_as_its_gate_would(cached, kind: str, damage: str) -> None:
    change, gate = DAMAGED[damage]
    entry = cached.entries(kind)[0]
    change(entry)
    done = cached.dagster(
        "asset", "materialize", "-m", "assets.definitions", "--select", "small/trained_lora"
    )
    words = refused(done)
    asset = {"latents": "vae_latents", "text": "text_embeddings"}[kind]
    assert words.what.startswith("GateClosedError: ")
    assert f"{gate}: " in words.what
    assert f"asset small/{asset}\n" in words.where
    assert entry.name in words.where
    assert "dagster job execute -m assets.definitions -j small_cache" in words.fix
    assert not (cached.out / "runs").exists()


RECIPES = {
    "no YAML": "datasets: [",
    "empty": "",
    "a list": "- 1",
    "an unknown key": '{"trainin": {}}',
    "a word for a number": '{"training": {"steps": "many"}}',
    "a text for a boolean": '{"recache": {"enabled": "False"}}',
    "min above max": '{"buckets": {"resolution": 64, "step": 8, "min_size": 128, "max_size": 64}}',
    "no multiple": '{"buckets": {"resolution": 100, "step": 8}}',
    "sizes that the model cannot divide": '{"buckets": {"resolution": 60, "step": 4}}',
    "an unknown gate": '{"checks": {"allow": ["no_such_gate"]}}',
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", RECIPES)
def test_each_broken_recipe(fresh, kind: str) -> None:
    text = RECIPES[kind]
    if text.startswith("{"):
        good = json.loads(fresh.file.read_text("utf-8"))
        text = json.dumps({**good, **json.loads(text)}, indent=1)
    fresh.file.write_text(text, encoding="utf-8")
    done = job(fresh)
    assert done.returncode == 1
    last = done.stderr[done.stderr.rindex("\nRecipeError: ") :]
    assert "Traceback" not in last
    assert "small.yaml" in last
    assert "fix:" in last
    assert not fresh.out.exists()


@pytest.mark.slow
def test_a_job_that_there_is_not_is_answered_with_those_that_there_are(fresh) -> None:
    done = job(fresh, "trian")
    assert done.returncode == 2
    [last] = done.stderr.rstrip().splitlines()[-1:]
    assert last.startswith("Error: ")
    assert "small_trian" in last
    assert "small_train'" in last
