from __future__ import annotations

import errno
import fcntl
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from pipeline.errors import TrainingError
from pipeline.trained_lora.run_folder import (
    RunLayout,
    checkpoint_list,
    checkpoint_name,
    checkpoint_step,
    hold_idle_run,
    hold_run,
    hold_training,
    is_being_trained,
    lora_steps,
    read_metrics,
    read_record,
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


def test_the_name_of_a_checkpoint_gives_its_step() -> None:
    names = {1: "step-00000001", 12_345_678: "step-12345678", 100_000_000: "step-100000000"}
    assert {step: checkpoint_name(step) for step in names} == names
    assert {checkpoint_step(Path("checkpoints", name)) for name in names.values()} == set(names)
    others = (".step-00000750-1-ab.tmp", "step-1", "step-00000500-01.png", "lora")
    assert {checkpoint_step(Path(name)) for name in others} == {None}


def test_the_steps_with_lora_files_are_listed_in_ascending_order(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    assert lora_steps(layout) == {}
    for name in ("step-100000000", "step-00000250", "step-00001000"):
        checkpoint(layout, name)
        (layout.checkpoints / name / "lora.json").write_bytes(b"{}")
    checkpoint(layout, "step-00000500")
    folders = {step: f"step-{step:08}" for step in (250, 1000, 100_000_000)}
    assert [(step, path.name) for step, path in lora_steps(layout).items()] == list(folders.items())


def test_the_last_complete_line_of_each_step_of_the_plan_is_read_in_order(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": step + 0.5}) for step in (2, 0, 4, 3, 1)]
    damaged = ['{"step": 1, "lo', "\xff", '{"loss": 9.0}', '{"step": null}', "[1, 2]", ""]
    file.write_text("\n".join([*damaged, '{"step": 1, "loss": 7.0}', *damaged, *lines, *damaged]), "latin-1")
    assert read_metrics(file, 3) == [{"step": step, "loss": step + 0.5} for step in range(3)]
    assert read_metrics(tmp_path / "missing.jsonl", 3) == []


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
            first.wait()
            assert is_being_trained(layout), "the second process holds the lock that the first one lost"
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


def test_a_training_deletes_the_request_to_stop_that_an_earlier_one_left(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    layout.stop_request.touch()
    with hold_training(layout):
        assert not layout.stop_request.exists()


Hold = Callable[[RunLayout], AbstractContextManager[None]]


def held_by_step(layout: RunLayout) -> AbstractContextManager[None]:
    return hold_run(layout, pytest.fail)


HOLDS = pytest.mark.parametrize("hold", [held_by_step, hold_training, hold_idle_run])


@HOLDS
def test_a_held_run_counts_as_being_trained_until_the_body_ends_or_fails(tmp_path: Path, hold: Hold) -> None:
    layout = RunLayout(tmp_path)
    with hold(layout):
        assert is_being_trained(layout)
    assert not is_being_trained(layout)

    # The error keeps the frames of the functions that it passed through, and with them their lock objects.
    with pytest.raises(OSError, match="disk full") as error, hold(layout):
        raise OSError("disk full")
    assert not is_being_trained(layout)
    assert error.value is not None


@HOLDS
def test_O08_without_locks_of_the_file_system_no_lock_file_replaces_them(
    tmp_path: Path, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed would leave such a file, and nobody could train the run again."""
    layout = RunLayout(tmp_path)
    with hold(layout):
        pass

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(OSError, match="not implemented"), hold(layout):
        pass
    with pytest.raises(OSError, match="not implemented"):
        is_being_trained(layout)


def test_only_an_existing_run_that_nobody_trains_is_idle(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "0123")
    with pytest.raises(TrainingError, match="does not exist"), hold_idle_run(layout):
        pass
    with hold_run(layout, pytest.fail):
        with pytest.raises(TrainingError, match="is being trained"), hold_idle_run(layout):
            pass
        assert is_being_trained(layout)


def test_the_folders_of_a_run_are_created_when_it_is_held(tmp_path: Path) -> None:
    for number, hold in enumerate((held_by_step, hold_training)):
        layout = RunLayout(tmp_path / str(number) / "runs" / "0123")
        for _ in range(2):
            with hold(layout):
                assert layout.folder.is_dir()


@pytest.mark.parametrize("content", [None, "{", "[]", "1"], ids=str)
def test_a_missing_or_damaged_file_has_no_facts(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    assert read_record(tmp_path / "run.json") == {}
    (tmp_path / "run.json").write_text('{"steps": 5}')
    assert read_record(tmp_path / "run.json") == {"steps": 5}
