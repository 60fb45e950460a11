from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import TrainingError
from pipeline.trained_lora.run_folder import (
    RunLayout,
    checkpoint_list,
    hold_run,
    hold_training,
    is_being_trained,
)


def checkpoint(layout: RunLayout, name: str, *, complete: bool = True) -> None:
    folder = layout.checkpoints / name
    folder.mkdir(parents=True)
    (folder / "adapter.safetensors").write_bytes(b"x" * 100)
    if complete:
        (folder / "COMPLETE").write_bytes(b"{}")


def test_complete_checkpoints_are_listed_newest_first(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    assert checkpoint_list(layout) == []
    checkpoint(layout, "step-00000250")
    checkpoint(layout, "step-00001000")
    checkpoint(layout, "step-00000500", complete=False)
    checkpoint(layout, ".step-00000750-1-ab.tmp")
    assert checkpoint_list(layout) == [{"step": 1000, "bytes": 102}, {"step": 250, "bytes": 102}]


HOLD = """
import sys, time
from pathlib import Path
from pipeline.trained_lora.run_folder import RunLayout, hold_run
with hold_run(RunLayout(Path(sys.argv[1])), print):
    print("held", flush=True)
    time.sleep(60)
"""


def test_O08_a_second_process_waits_until_the_first_process_ends(tmp_path: Path) -> None:
    layout, log = RunLayout(tmp_path / "run"), list[str]()
    layout.folder.mkdir()
    layout.lock.write_bytes(b"")  # Run folders of earlier versions contain this file.
    command = [sys.executable, "-c", HOLD, str(layout.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"

        def kill_first(line: str) -> None:
            log.append(line)
            first.kill()

        with hold_run(layout, kill_first):
            pass
    assert len(log) == 1
    assert "another process is training this run" in log[0]


def test_an_unlocked_run_is_locked_without_waiting(tmp_path: Path) -> None:
    log = list[str]()
    for _ in range(2):
        with hold_run(RunLayout(tmp_path / "run"), log.append):
            assert (tmp_path / "run" / "lock").is_file()
    assert log == []


def test_only_one_process_trains_a_run(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "0123")
    assert not is_being_trained(layout)
    with hold_training(layout):
        assert is_being_trained(layout)
        with pytest.raises(TrainingError, match="run 0123 is already being trained"):
            hold_training(layout, 0.2).__enter__()
    assert not is_being_trained(layout)
    with hold_training(layout):
        pass
