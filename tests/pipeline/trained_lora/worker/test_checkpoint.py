from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import stat
from pathlib import Path

import pytest
import torch

from pipeline.errors import TrainingError
from pipeline.trained_lora.worker.checkpoint import (
    ADAPTER_FILE,
    MARKER,
    OPTIMIZER_FILE,
    TrainingState,
    checkpoint_path,
    load_checkpoint,
    newest_checkpoint,
    prune_checkpoints,
    remove_leftovers,
    save_checkpoint,
)
from tests.pipeline.disk_calls import DiskCalls


def state_of(step: int) -> TrainingState:
    moments = {
        "optimizer": {"state": {0: {"exp_avg": torch.full((3,), float(step))}}},
        "schedule": {"last": step},
    }
    return TrainingState(step, {"a.lora_A.weight": torch.full((2, 3), float(step))}, moments)


def saved(folder: Path, *steps: int) -> None:
    for step in steps:
        save_checkpoint(folder, "run", state_of(step))


def test_a_checkpoint_reads_back_as_it_was_saved(tmp_path: Path) -> None:
    saved(tmp_path, 7)
    state = load_checkpoint(tmp_path / "step-00000007", "run")
    assert state.step == 7
    assert torch.equal(state.adapter["a.lora_A.weight"], torch.full((2, 3), 7.0))
    assert torch.equal(state.optimizer["optimizer"]["state"][0]["exp_avg"], torch.full((3,), 7.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000007"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664), (0o077, 0o600)])
def test_the_files_of_a_checkpoint_follow_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        saved(tmp_path, 7)
    finally:
        os.umask(before)
    files = [*(tmp_path / "step-00000007").iterdir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {mode}


@pytest.mark.parametrize("name", [ADAPTER_FILE, OPTIMIZER_FILE, MARKER])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_R07_the_newest_valid_checkpoint_is_loaded_and_damaged_ones_are_reported(
    tmp_path: Path, name: str, damage: str
) -> None:
    saved(tmp_path, 2, 4)
    file = tmp_path / "step-00000004" / name
    content = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content if damage == "flipped" else content[: len(content) // 2])
    log: list[str] = []
    newest = newest_checkpoint(tmp_path, "run", last_step=10, log=log.append)
    assert newest is not None
    assert newest.step == 2
    assert len(log) == 1
    assert "step-00000004" in log[0]


def test_R07_partial_checkpoints_are_ignored_and_removed(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    (tmp_path / "step-00000002").rename(tmp_path / ".step-00000002-1-abcd.tmp")
    assert newest_checkpoint(tmp_path, "run", last_step=10, log=pytest.fail) is None
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_leftover_that_cannot_be_deleted_is_no_error(tmp_path: Path) -> None:
    leftover = tmp_path / ".step-00000002-1-abcd.tmp"
    leftover.write_text("a file instead of a folder")
    remove_leftovers(tmp_path)
    assert leftover.exists()


def test_another_run_s_checkpoint_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    with pytest.raises(TrainingError, match="belongs to run run, not to other"):
        load_checkpoint(checkpoint_path(tmp_path, 2), "other")


def test_a_checkpoint_beyond_the_plan_is_ignored(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4)
    for last_step, expected in ((3, 2), (4, 4), (5, 4)):
        newest = newest_checkpoint(tmp_path, "run", last_step=last_step, log=pytest.fail)
        assert newest is not None
        assert newest.step == expected, last_step
    assert newest_checkpoint(tmp_path, "run", last_step=1, log=pytest.fail) is None
    assert newest_checkpoint(tmp_path / "none", "run", last_step=4, log=pytest.fail) is None


def write_lora(folder: Path) -> None:
    (folder / "pytorch_lora_weights.safetensors").write_bytes(b"a LoRA")


def test_pruning_removes_the_state_of_a_checkpoint_and_keeps_its_lora(tmp_path: Path) -> None:
    saved(tmp_path, 1)  # as an earlier version saved it, without a LoRA
    for step in (2, 4, 6):
        save_checkpoint(tmp_path, "run", state_of(step), export=write_lora)
    assert prune_checkpoints(tmp_path, keep=1, newest=6) == [1, 2, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-0000000{step}" for step in (2, 4, 6)]
    for step in (2, 4):
        names = {path.name for path in checkpoint_path(tmp_path, step).iterdir()}
        assert names == {"lora.json", "pytorch_lora_weights.safetensors"}
    assert prune_checkpoints(tmp_path, keep=1, newest=6) == []
    newest = newest_checkpoint(tmp_path, "run", last_step=10, log=pytest.fail)
    assert newest is not None
    assert newest.step == 6
    assert newest_checkpoint(tmp_path, "run", last_step=5, log=pytest.fail) is None


def test_a_failed_export_keeps_the_existing_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, 2)

    def unverified(folder: Path) -> None:
        write_lora(folder)
        raise TrainingError("does not read back", where=str(folder), fix="check the disk")

    with pytest.raises(TrainingError, match="does not read back"):
        save_checkpoint(tmp_path, "run", state_of(2), export=unverified)
    assert load_checkpoint(checkpoint_path(tmp_path, 2), "run").step == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    (tmp_path / "step-00000002" / MARKER).write_text("torn")
    saved(tmp_path, 2)
    assert load_checkpoint(checkpoint_path(tmp_path, 2), "run").step == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_a_failed_save_keeps_the_existing_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 2)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        saved(tmp_path, 2)
    assert load_checkpoint(checkpoint_path(tmp_path, 2), "run").step == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_R07_all_files_of_a_checkpoint_are_synced_before_it_gets_its_name_and_its_folder_afterwards(
    tmp_path: Path, disk_calls: DiskCalls
) -> None:
    def export(folder: Path) -> None:
        (folder / "lora.safetensors").write_bytes(b"weights")

    path = save_checkpoint(tmp_path, "run", state_of(7), export=export)
    assert disk_calls.names == [path.name]
    assert disk_calls.unsynced == []
    assert disk_calls.is_synced(tmp_path), "the checkpoint's name could be lost in a power failure"


def test_pruning_ignores_later_checkpoints_and_files_that_are_already_missing(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save_checkpoint(tmp_path, "run", state_of(step), export=write_lora)
    (checkpoint_path(tmp_path, 2) / OPTIMIZER_FILE).unlink()
    assert prune_checkpoints(tmp_path, keep=1, newest=4) == [2]
    assert [step for step in (2, 4, 6) if (checkpoint_path(tmp_path, step) / MARKER).exists()] == [4, 6]
    assert prune_checkpoints(tmp_path, keep=2, newest=6) == []


def rewritten(path: Path, marker: object) -> None:
    (path / MARKER).write_text(json.dumps(marker))


@pytest.mark.parametrize("change", ["another file", "a file less", "another step", "renamed folder"])
def test_a_marker_of_other_files_or_another_step_is_an_error(tmp_path: Path, change: str) -> None:
    saved(tmp_path, 2)
    path = checkpoint_path(tmp_path, 2)
    marker = json.loads((path / MARKER).read_text())
    if change == "another file":
        (path / "more").write_bytes(b"")
        marker["sha256"]["more"] = hashlib.sha256(b"").hexdigest()
    elif change == "a file less":
        del marker["sha256"][OPTIMIZER_FILE]
    elif change == "another step":
        marker["step"] = 3
    else:
        path = path.rename(checkpoint_path(tmp_path, 3))
    rewritten(path, marker)
    with pytest.raises(TrainingError, match="lists other files or another step"):
        load_checkpoint(path, "run")


@pytest.mark.parametrize(
    "marker", [[], {}, {"sha256": []}, {"sha256": {}, "step": None}, {"sha256": {}, "step": "x"}, 1], ids=str
)
def test_a_marker_without_its_facts_is_an_error(tmp_path: Path, marker: object) -> None:
    saved(tmp_path, 2)
    rewritten(checkpoint_path(tmp_path, 2), marker)
    with pytest.raises(TrainingError, match="COMPLETE or a file that it lists is not readable"):
        load_checkpoint(checkpoint_path(tmp_path, 2), "run")


def test_loading_a_checkpoint_runs_no_code_that_its_files_may_contain(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    path = checkpoint_path(tmp_path, 2)
    torch.save({"optimizer": Path("an object of a class")}, path / OPTIMIZER_FILE)
    marker = json.loads((path / MARKER).read_text())
    marker["sha256"][OPTIMIZER_FILE] = hashlib.sha256((path / OPTIMIZER_FILE).read_bytes()).hexdigest()
    rewritten(path, marker)
    with pytest.raises(pickle.UnpicklingError):
        load_checkpoint(path, "run")


def test_the_error_of_an_export_is_raised_even_if_its_folder_is_gone(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        shutil.rmtree(folder)
        raise TrainingError("does not read back", where="disk", fix="check it")

    with pytest.raises(TrainingError, match="does not read back"):
        save_checkpoint(tmp_path / "new", "run", state_of(2), export=fail)
    assert list((tmp_path / "new").iterdir()) == []
