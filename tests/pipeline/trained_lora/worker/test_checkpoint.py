from __future__ import annotations

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


def test_another_run_s_checkpoint_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    with pytest.raises(TrainingError, match="belongs to run run, not to other"):
        load_checkpoint(checkpoint_path(tmp_path, 2), "other")


def test_a_checkpoint_beyond_the_plan_is_ignored(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4)
    newest = newest_checkpoint(tmp_path, "run", last_step=3, log=pytest.fail)
    assert newest is not None
    assert newest.step == 2


def write_lora(folder: Path) -> None:
    (folder / "pytorch_lora_weights.safetensors").write_bytes(b"a LoRA")


def test_pruning_removes_the_state_of_a_checkpoint_and_keeps_its_lora(tmp_path: Path) -> None:
    saved(tmp_path, 1)  # as an earlier version saved it, without a LoRA
    for step in (2, 4, 6):
        save_checkpoint(tmp_path, "run", state_of(step), export=write_lora)
    assert prune_checkpoints(tmp_path, keep=1, newest=6) == [1, 2, 4]
    assert not checkpoint_path(tmp_path, 1).exists()
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
