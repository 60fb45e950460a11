"""Runs at an address: the needed ones are kept, and deleting one is safe at any point."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import fsspec
import pytest

from pipeline.errors import TrainingError
from pipeline.maintenance.old_runs import RunSurvey
from pipeline.maintenance.remote_runs import SILENCE_S, RemoteRuns
from pipeline.outputs.folder import OutputFolder
from pipeline.outputs.lease import STALE_S, Clock, Lease
from pipeline.storage.addresses import Url
from pipeline.storage.remote_folder import RemoteFolder
from pipeline.trained_lora.run_folder import RunLayout, hold_run, run_folder
from tests.small_recipe import small_recipe

OTHER, FINISHED, PUBLISHED, NEWEST = ("1" * 16, "2" * 16, "3" * 16, "4" * 16)


@pytest.fixture
def address() -> Url:
    """Four runs at an address, of which OTHER changed first and NEWEST last."""
    address = Url(f"memory://{uuid.uuid4().hex}/flowers")
    remote = RemoteFolder(address)
    for run in (OTHER, FINISHED, PUBLISHED, NEWEST):
        add_run(remote, run)
    remote.put(f"runs/{FINISHED}/finished.json", b'{"steps": 1500}')
    remote.put(f"runs/{PUBLISHED}/finished.json", b'{"steps": 1500}')
    remote.put(f"runs/{NEWEST}/run.json", b"{}")
    remote.put("lora/provenance.json", json.dumps({"run": PUBLISHED}).encode())
    return address


def add_run(remote: RemoteFolder, run: str) -> None:
    files = {
        "checkpoints/step-00000250/optimizer.pt": b"x" * 1000,
        "checkpoints/step-00000250/COMPLETE": b"{}",
        "lora/pytorch_lora_weights.safetensors": b"x" * 100,
        "run.json": b"{}",
    }
    for name, data in files.items():
        remote.put(f"runs/{run}/{name}", data)


def machine(address: Url, folder: Path) -> RemoteRuns:
    return RemoteRuns(OutputFolder(address, folder))


def survey(runs: RemoteRuns, *, num_newest: int = 0, will_delete: bool = False) -> RunSurvey:
    return runs.survey(num_newest=num_newest, recipes=[], will_delete=will_delete)


def kept(survey: RunSurvey) -> dict[str, str]:
    return {run.folder.name: run.kept for run in survey.runs}


def lease_of(address: Url, run: str, wait: Callable[[float], object] = lambda _s: None) -> Lease:
    return Lease(RemoteFolder(address), f"runs/{run}/lease", owner="another", clock=Clock(wait=wait))


def silence(address: Url, run: str, seconds: float = SILENCE_S) -> None:
    """Let the last heartbeat of a lease have been some time ago."""
    files = fsspec.filesystem("memory")
    file = files.store[f"/{str(address).removeprefix('memory://')}/runs/{run}/lease"]
    file.created -= timedelta(seconds=seconds + 1)


def names(address: Url, run: str) -> list[str]:
    return sorted(
        name.removeprefix(f"runs/{run}/") for name in RemoteFolder(address).list_files(f"runs/{run}")
    )


def test_runs_are_listed_from_the_newest_with_size_state_and_reason(address: Url, tmp_path: Path) -> None:
    surveyed = survey(machine(address, tmp_path))
    assert surveyed.where == f"{address}/runs"
    assert next(run.folder.name for run in surveyed.runs) == NEWEST
    runs = {run.folder.name: run for run in surveyed.runs}
    assert runs[OTHER].num_bytes == 1000 + 2 + 100 + 2
    assert runs[OTHER].state == "unfinished, resumes from step 250"
    assert runs[FINISHED].state == "finished at step 1,500"
    assert kept(surveyed) == {
        NEWEST: "newest, and can be resumed",
        PUBLISHED: "in lora/",
        FINISHED: "",
        OTHER: "",
    }
    assert set(kept(survey(machine(address, tmp_path), num_newest=4)).values()) == {"newest", "in lora/"}


def test_an_old_run_is_deleted_at_the_address_and_in_the_working_copy(address: Url, tmp_path: Path) -> None:
    runs = machine(address, tmp_path)
    for run in survey(runs).old:
        runs.delete(run.folder)
    assert (names(address, OTHER), names(address, FINISHED)) == ([], [])
    assert len(names(address, PUBLISHED)) == 5
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [PUBLISHED, NEWEST]
    assert not survey(machine(address, tmp_path / "another")).leftovers


def test_a_run_that_is_being_trained_on_either_machine_is_kept(address: Url, tmp_path: Path) -> None:
    runs = machine(address, tmp_path)
    lease_of(address, OTHER).acquire()
    with hold_run(RunLayout(run_folder(tmp_path, FINISHED)), print):
        surveyed = survey(runs, will_delete=True)
        assert kept(surveyed)[OTHER].endswith(" is training this run")
        assert kept(surveyed)[FINISHED] == "being trained"
        for run in (OTHER, FINISHED):
            with pytest.raises(TrainingError, match=r"uses it|is being trained"):
                runs.delete(run_folder(tmp_path, run))
    assert "run.json" in names(address, OTHER)
    assert "finished.json" in names(address, FINISHED)


def test_the_lease_of_a_dead_machine_does_not_keep_a_run(address: Url, tmp_path: Path) -> None:
    lease_of(address, OTHER).acquire()
    runs = machine(address, tmp_path)
    silence(address, OTHER, seconds=SILENCE_S - 60)
    assert kept(survey(runs, will_delete=True))[OTHER].endswith(" is training this run")
    silence(address, OTHER, seconds=60)
    assert kept(survey(runs))[OTHER].endswith(" is training this run"), "a listing writes nothing"
    assert kept(survey(runs, will_delete=True))[OTHER] == ""
    runs.delete(run_folder(tmp_path, OTHER))
    assert names(address, OTHER) == []


def test_a_run_that_was_published_or_taken_over_since_the_survey_is_not_deleted(
    address: Url, tmp_path: Path
) -> None:
    runs, remote = machine(address, tmp_path), RemoteFolder(address)
    survey(runs)
    remote.put("lora/provenance.json", json.dumps({"run": OTHER}).encode())
    with pytest.raises(TrainingError, match=r"is needed now.*in lora/"):
        runs.delete(run_folder(tmp_path, OTHER))
    assert len(names(address, OTHER)) == 4
    assert lease_of(address, OTHER).read() == ("", None)

    remote.put("lora/provenance.json", json.dumps({"run": PUBLISHED}).encode())
    waiting = lease_of(address, OTHER)
    waiting.acquire()
    with pytest.raises(TrainingError, match="another machine uses it"):
        runs.delete(run_folder(tmp_path, OTHER))
    assert len(names(address, OTHER)) == 5


def test_a_machine_that_answers_after_the_survey_keeps_its_run(address: Url, tmp_path: Path) -> None:
    lease, runs = lease_of(address, OTHER), machine(address, tmp_path)
    lease.acquire()
    silence(address, OTHER)
    assert kept(survey(runs, will_delete=True))[OTHER] == ""
    lease.beat()
    with pytest.raises(TrainingError, match="another machine uses it"):
        runs.delete(run_folder(tmp_path, OTHER))
    assert len(names(address, OTHER)) == 5


@pytest.mark.parametrize("name", ["run.json", "checkpoints/step-00000500/COMPLETE"])
def test_a_run_that_was_resumed_and_stopped_since_the_survey_is_not_deleted(
    address: Url, tmp_path: Path, name: str
) -> None:
    runs = machine(address, tmp_path)
    survey(runs)
    RemoteFolder(address).put(f"runs/{OTHER}/{name}", b"newer")
    before = names(address, OTHER)
    with pytest.raises(TrainingError, match="its files have changed"):
        runs.delete(run_folder(tmp_path, OTHER))
    assert names(address, OTHER) == before


def test_a_deletion_whose_lease_is_lost_deletes_nothing_more(
    address: Url, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, remove, before = machine(address, tmp_path), RemoteFolder.remove, names(address, OTHER)
    survey(runs)

    def remove_and_lose(folder: RemoteFolder, name: str) -> None:
        remove(folder, name)
        folder.put(f"runs/{OTHER}/lease", b'{"machine": "two", "owner": "two", "token": "two"}')

    monkeypatch.setattr(RemoteFolder, "remove", remove_and_lose)
    with pytest.raises(TrainingError, match="another machine took it over"):
        runs.delete(run_folder(tmp_path, OTHER))
    assert {*names(address, OTHER), "run.json"} == {*before, "lease"}


def test_a_lora_without_provenance_keeps_all_runs(address: Url, tmp_path: Path) -> None:
    remote = RemoteFolder(address)
    remote.put("lora/pytorch_lora_weights.safetensors", b"x")
    remote.remove("lora/provenance.json")
    surveyed = survey(machine(address, tmp_path))
    assert set(kept(surveyed).values()) == {"lora/provenance.json does not exist"}


@pytest.mark.parametrize("killed_at", range(6))
def test_a_deletion_that_is_killed_anywhere_leaves_a_run_or_is_finished_by_another_machine(
    address: Url, tmp_path: Path, killed_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = names(address, FINISHED)
    runs, remove, num_removed = machine(address, tmp_path / "one"), RemoteFolder.remove, 0
    survey(runs)

    def killed(folder: RemoteFolder, name: str) -> None:
        nonlocal num_removed
        if num_removed == killed_at:
            raise SystemExit
        num_removed += 1
        remove(folder, name)

    with monkeypatch.context() as patched:
        patched.setattr(RemoteFolder, "remove", killed)
        patched.setattr(Lease, "release", lambda _lease: None)
        with pytest.raises(SystemExit):
            runs.delete(run_folder(tmp_path / "one", FINISHED))

    left = names(address, FINISHED)
    assert "lease" in left, "a killed process does not release it"
    left.remove("lease")
    assert left == before or "run.json" not in left
    # The files that a marker stands for are all there while the marker is.
    if "finished.json" in left:
        assert "lora/pytorch_lora_weights.safetensors" in left
    if "checkpoints/step-00000250/COMPLETE" in left:
        assert "checkpoints/step-00000250/optimizer.pt" in left

    other = machine(address, tmp_path / "two")
    if "run.json" not in left:
        (incomplete,) = survey(machine(address, tmp_path / "three")).incomplete
        assert incomplete.folder.name == FINISHED
        assert (
            "is deleting this run, or has stopped: a later --delete then deletes the rest" in incomplete.state
        )
    silence(address, FINISHED, seconds=STALE_S)
    surveyed = survey(other, will_delete=True)
    assert surveyed.incomplete == []
    is_leftover = run_folder(tmp_path / "two", FINISHED) in surveyed.leftovers
    assert is_leftover or kept(surveyed)[FINISHED] == ""
    other.delete(run_folder(tmp_path / "two", FINISHED))
    assert names(address, FINISHED) == []


def test_a_job_waits_for_a_deletion_and_finds_no_run(
    address: Url, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, found = machine(address, tmp_path), list[list[str]]()
    survey(runs)
    remove, is_waiting, may_end = RemoteFolder.remove, threading.Event(), threading.Event()

    def train() -> None:
        lease = lease_of(address, OTHER, lambda _s: (is_waiting.set(), may_end.wait(60)))
        lease.acquire()
        found.append(names(address, OTHER))

    def remove_after_the_job_started(folder: RemoteFolder, name: str) -> None:
        if not is_waiting.is_set():
            job.start()
            assert is_waiting.wait(60)
        remove(folder, name)

    job = threading.Thread(target=train)
    monkeypatch.setattr(RemoteFolder, "remove", remove_after_the_job_started)
    runs.delete(run_folder(tmp_path, OTHER))
    may_end.set()
    job.join(60)
    assert found == [["lease"]]


def test_a_start_file_in_the_working_copy_keeps_its_run(address: Url, tmp_path: Path) -> None:
    file = run_folder(tmp_path, OTHER) / "lora/pytorch_lora_weights.safetensors"
    recipe = small_recipe(tmp_path / "elsewhere", "birds", training={"lora": {"start_from": str(file)}})
    surveyed = machine(address, tmp_path).survey(num_newest=0, recipes=[recipe], will_delete=False)
    assert kept(surveyed)[OTHER] == "start_from of birds"
