"""Which entries users of a cache need, if their folders are here, missing, or on another machine."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import fsspec
import pytest

from pipeline.cache.entry_format import EntrySpec
from pipeline.cache.local_folder import LocalFolder
from pipeline.cache.store import Store
from pipeline.cache.users import read_users, register_run, register_user
from pipeline.maintenance.gc import delete, survey
from pipeline.maintenance.needed_keys import NeededKeys, StaleRun, delete_stale
from pipeline.storage.addresses import Address, Url
from pipeline.storage.remote_folder import RemoteFolder
from pipeline.trained_lora.run_folder import RunLayout, hold_run, run_folder
from tests.pipeline.packs_case import spec_of, values_of

RUN, OTHER_RUN = "1" * 16, "2" * 16
KEYS = [hashlib.sha256(bytes([index])).hexdigest() for index in range(3)]


def start_run(cache: Path, output: Path, run: str = RUN, *, keys: list[str] = KEYS[:1]) -> RunLayout:
    """Do what a training does before its first step."""
    layout = RunLayout(run_folder(output, run))
    layout.folder.mkdir(parents=True)
    layout.facts.write_text("{}")
    register_run(cache, output, recipe="flowers", run=run, keys=keys)
    return layout


def register_job(cache: Path, output: Address, keys: list[str]) -> None:
    register_user(cache, output, recipe="flowers", kind="latents", keys=keys)


def runs_in(cache: Path) -> set[str]:
    return {run for user in read_users(cache) for run in user.run_keys}


@pytest.mark.parametrize("has_same_name", [True, False], ids=["same host name", "other host name"])
def test_H01_gc_keeps_the_entries_of_a_training_on_another_machine_whose_recipe_was_edited(
    tmp_path: Path, has_same_name: bool
) -> None:
    """Machine a trains a run. Its recipe is edited, and a cache job replaces the keys. Then b collects."""
    cache, output = Store(tmp_path / "cache"), tmp_path / "out"
    specs = [spec_of(number) for number in range(3)]
    for number, spec in enumerate(specs):
        cache.write(spec, values_of(number), {})
    of_run, of_job, orphan = specs
    with mock.patch("platform.node", return_value="a"):
        start_run(cache.root, output, keys=[of_run.key])
        register_job(cache.root, output, [of_run.key])
        register_job(cache.root, output, [of_job.key])
    output.rename(tmp_path / "disk of a")
    # Machine b has the same path with another output folder.
    with mock.patch("platform.node", return_value="a" if has_same_name else "b"):
        register_job(cache.root, output, [])
        surveyed = survey(cache.root, grace_s=-60)
        delete(cache.root, surveyed)
    assert (surveyed.stale_runs, runs_in(cache.root)) == ([], {RUN})
    assert existing(cache, specs) == {of_run.key, of_job.key} == {each.key for each in specs} - {orphan.key}


def existing(store: Store, specs: list[EntrySpec]) -> set[str]:
    return {spec.key for spec in specs if store.path(spec).exists()}


def test_L13_the_registration_of_a_finished_or_deleted_run_keeps_no_entries(tmp_path: Path) -> None:
    cache, output = tmp_path / "cache", tmp_path / "out"
    layout = start_run(cache, output)
    start_run(cache, output, OTHER_RUN, keys=KEYS[1:2])
    needed = NeededKeys(cache)
    assert needed.read() == set(KEYS[:2])
    assert needed.stale_runs == []

    layout.finished.write_text("{}")
    layout_of_other = RunLayout(run_folder(output, OTHER_RUN))
    layout_of_other.facts.unlink()
    layout_of_other.folder.rmdir()
    assert needed.read() == set()
    assert needed.stale_runs == [StaleRun(output, RUN), StaleRun(output, OTHER_RUN)]
    assert runs_in(cache) == {RUN, OTHER_RUN}, "a survey changes nothing"
    assert delete(cache, survey(cache)) == (2, 64)
    assert runs_in(cache) == set()


def test_L13_a_run_that_trains_again_since_the_survey_stays_registered(tmp_path: Path) -> None:
    cache, output = tmp_path / "cache", tmp_path / "out"
    layout = start_run(cache, output)
    layout.finished.write_text("{}")
    (stale,) = survey(cache).stale_runs
    with hold_run(layout, print):
        assert not delete_stale(cache, stale), "a process holds the run's lock"
    layout.finished.unlink()
    assert not delete_stale(cache, stale), "the run is unfinished again"
    assert runs_in(cache) == {RUN}
    layout.finished.write_text("{}")
    assert delete_stale(cache, stale)
    assert runs_in(cache) == set()


def test_L13_a_run_of_a_missing_output_folder_stays_registered(tmp_path: Path) -> None:
    cache, output = tmp_path / "cache", tmp_path / "out"
    start_run(cache, output)
    output.rename(tmp_path / "not mounted")
    needed = NeededKeys(cache)
    assert (needed.read(), needed.stale_runs) == (set(KEYS[:1]), [])


@pytest.fixture
def at_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Path, Url, RemoteFolder, str]]:
    """Return a cache, the address of an output folder with a registered run, its files, and their folder."""
    deployment = tmp_path / "deployment.yaml"
    deployment.write_text(f"scratch: {tmp_path}/scratch\n", encoding="utf-8")
    monkeypatch.setenv("LATENTLINE_DEPLOYMENT", str(deployment))
    name = uuid.uuid4().hex
    output = Url(f"memory://{name}/out")
    register_run(tmp_path / "cache", output, recipe="flowers", run=RUN, keys=KEYS[:1])
    yield tmp_path / "cache", output, RemoteFolder(output), f"runs/{RUN}"
    memory = fsspec.filesystem("memory")
    if memory.exists(f"/{name}"):
        memory.rm(f"/{name}", recursive=True)


@pytest.mark.parametrize(
    ("files", "is_stale"),
    [
        (["lease"], False),
        (["lease", "run.json", "finished.json"], False),
        (["run.json"], False),
        (["run.json", "finished.json"], True),
        (["checkpoints/step-00000250/optimizer.pt"], True),
        ([], True),
    ],
    ids=["starting", "training again", "interrupted", "finished", "half deleted", "deleted"],
)
def test_L13_a_run_at_an_address_stays_registered_until_it_is_finished_or_deleted_there(
    at_address: tuple[Path, Url, RemoteFolder, str], files: list[str], is_stale: bool
) -> None:
    cache, output, remote, top = at_address
    for name in files:
        remote.put(f"{top}/{name}", b"{}")
    needed = NeededKeys(cache)
    keys = needed.read()
    assert needed.stale_runs == ([StaleRun(output, RUN)] if is_stale else [])
    assert keys == (set() if is_stale else {KEYS[0]})
    delete(cache, survey(cache))
    assert runs_in(cache) == (set() if is_stale else {RUN})


def test_only_changed_registrations_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files_read: list[str] = []

    class RecordingFolder(LocalFolder):
        def read(self, name: str) -> bytes:
            files_read.append(name.rpartition(".")[2])
            return super().read(name)

    monkeypatch.setattr("pipeline.cache.users.cache_folder", RecordingFolder)
    cache, output = tmp_path / "cache", tmp_path / "out"
    register_job(cache, output, KEYS[:1])
    register_user(cache, output, recipe="flowers", kind="text", keys=KEYS[1:2])
    needed = NeededKeys(cache)
    first = needed.read()
    assert first == set(KEYS[:2])

    files_read.clear()
    assert needed.read() is first
    assert files_read == ["json"]
    register_job(cache, output, KEYS[2:])
    files_read.clear()
    assert needed.read() == set(KEYS[1:])
    assert files_read == ["json", "keys"]
