"""While a run is unfinished, the cache lists every entry that it reads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cache.users import CacheUser, read_users, register_user
from pipeline.errors import LaunchError, StoreError
from pipeline.maintenance.old_runs import delete_run
from pipeline.trained_lora.job import TrainingJob, read_job
from pipeline.trained_lora.registered_run import run_entry_keys
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.namespaces import namespace
from tests.pipeline.trained_lora.runs import run, run_folders

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


class RecordingLaunch(InProcessLaunch):
    """A launcher that records the users of the cache before it trains."""

    def __init__(self, cache_dir: Path) -> None:
        super().__init__()
        self.cache_dir = cache_dir
        self.users: list[CacheUser] = []

    def __call__(self, module: str, job_file: Path) -> None:
        self.users = users_of(self.cache_dir)
        super().__call__(module, job_file)


def users_of(cache_dir: Any) -> list[CacheUser]:
    return list(read_users(cache_dir))


def entries_read(job: TrainingJob) -> set[str]:
    """Return the keys of all entries of a job, one object at a time."""
    specs = [job.empty_text, *(entry.text for prompt in job.prompts for entry in prompt.entries())]
    for each in job.inputs:
        specs += [caption.entry for caption in each.variants]
        specs += [] if each.empty_text is None else [each.empty_text]
        for view in each.views:
            specs += [view.entry, *view.references, *([] if view.mask is None else [view.mask])]
    return {spec.key for spec in specs}


PREVIEW = {"prompt": "a cat", "negative_prompt": "a dog"}


def test_L13_a_training_registers_its_entries_until_it_has_finished(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(sample_every=6, sample_prompts=[PREVIEW], steps=2)
    recipe = project.recipe
    launch = RecordingLaunch(recipe.cache_dir)
    result = run(project, launch)
    (user,) = launch.users
    job = read_job(launch.orders[0])
    assert (user.output_dir, user.recipe) == (recipe.output_dir, recipe.name)
    assert user.run_keys == {result.report["run"]: entries_read(job)}
    previews = {RecipeEntries(recipe).text_spec(text).key for text in ("", "a cat", "a dog")}
    assert previews < entries_read(job)
    assert [each.run_keys for each in users_of(recipe.cache_dir)] == [{}], "the run has finished"


def test_L13_masks_and_references_of_a_run_are_among_its_entries(
    make_project: Callable[..., Project],
) -> None:
    with_both = {"mask": {"path": "masks"}, "references": [{"path": "shapes"}]}
    project = make_project(prediction="klein", datasets={"photos": with_both}, dropout=0)
    job = project.job()
    keys = run_entry_keys(job)
    assert set(keys) == entries_read(job)
    assert {"masks", "references"} <= set(job.inputs.table.columns)


def test_L13_a_cache_job_keeps_the_registration_of_an_unfinished_run(
    make_project: Callable[..., Project],
) -> None:
    """The recipe was edited, and its cache job replaced the registered keys."""
    project, launch = make_project(), InProcessLaunch()
    launch.stop_after = 2
    with pytest.raises(LaunchError):
        run(project, launch)
    recipe, keys = project.recipe, entries_read(read_job(launch.orders[0]))
    for kind in ("latents", "text"):
        register_user(
            recipe.cache_dir, recipe.registered_output, recipe=recipe.name, kind=kind, keys=["0" * 64]
        )
    (user,) = users_of(recipe.cache_dir)
    assert (user.keys, user.run_keys) == ({"0" * 64}, {run_folders(project)[0].name: keys})


def test_L13_a_resumed_run_registers_again(make_project: Callable[..., Project]) -> None:
    project = make_project()
    launch = RecordingLaunch(project.recipe.cache_dir)
    launch.stop_after = 2
    with pytest.raises(LaunchError):
        run(project, launch)
    for file in (project.recipe.cache_dir / "outputs").glob("*.keys"):
        file.unlink()
    launch.stop_after = None
    assert run(project, launch).report["resumed_from"] == 3
    assert list(launch.users[0].run_keys) == [run_folders(project)[0].name]
    assert users_of(project.recipe.cache_dir)[0].run_keys == {}


def test_L13_deleting_the_folder_of_a_run_deletes_its_registration(
    make_project: Callable[..., Project],
) -> None:
    project, launch = make_project(), InProcessLaunch()
    launch.stop_after = 2
    with pytest.raises(LaunchError):
        run(project, launch)
    assert len(users_of(project.recipe.cache_dir)[0].run_keys) == 1
    log: list[str] = []
    delete_run(run_folders(project)[0], log=log.append)
    assert (users_of(project.recipe.cache_dir)[0].run_keys, log) == ({}, [])


def test_L13_a_registration_that_a_killed_process_left_is_deleted_by_the_next_job(
    make_project: Callable[..., Project],
) -> None:
    project, launch = make_project(), InProcessLaunch()
    run(project, launch)
    outputs = project.recipe.cache_dir / "outputs"
    (left,) = outputs.glob("*.json")
    (outputs / f"{left.stem}-run-{run_folders(project)[0].name}.keys").write_bytes(bytes(32))
    assert not run(project, launch).report["launched"]
    assert users_of(project.recipe.cache_dir)[0].run_keys == {}


def test_L13_a_training_that_cannot_register_does_not_start(make_project: Callable[..., Project]) -> None:
    project, launch = make_project(), InProcessLaunch()
    outputs = project.recipe.cache_dir / "outputs"
    outputs.write_text("not a folder")
    with pytest.raises(StoreError, match="the training reads cannot be registered") as excinfo:
        run(project, launch)
    assert excinfo.value.where == str(outputs)
    assert excinfo.value.fix
    assert launch.orders == []


REGISTER = """
import sys
from pathlib import Path
from pipeline.trained_lora.job import read_job
from pipeline.trained_lora.registered_run import register_entries
register_entries(read_job(Path(sys.argv[1])), log=print)
"""


def test_L13_a_training_with_a_read_only_cache_gets_a_warning(make_project: Callable[..., Project]) -> None:
    project = make_project()
    outputs = project.recipe.cache_dir / "outputs"
    mount = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'
    command = [sys.executable, "-c", REGISTER, str(project.job().write())]
    completed = subprocess.run(
        [*namespace(), "sh", "-c", mount, "sh", str(project.recipe.cache_dir), *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith("warning: the entries that the training reads cannot be registered")
    assert str(outputs) in completed.stdout
    assert not outputs.exists()


def test_a_registration_that_cannot_be_deleted_does_not_fail_a_finished_training(
    make_project: Callable[..., Project],
) -> None:
    project, log = make_project(), list[str]()

    class BreakingLaunch(InProcessLaunch):
        def __call__(self, module: str, job_file: Path) -> None:
            super().__call__(module, job_file)
            for file in (project.recipe.cache_dir / "outputs").glob("*-run-*"):
                file.unlink()
                file.mkdir()

    assert run(project, BreakingLaunch(), log).report["launched"]
    (warning,) = [line for line in log if "stay registered" in line]
    assert "a registration in the cache cannot be deleted" in warning
    assert str(project.recipe.cache_dir / "outputs") in warning
