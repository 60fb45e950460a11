"""A training records every entry that it reads before it relies on one, so that gc keeps them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cache.used_keys import FOLDER, KeyLists
from pipeline.errors import GateClosedError, LaunchError, StoreError
from pipeline.trained_lora.job import TrainingJob, read_job
from tests.pipeline.trained_lora.runs import InProcessLaunch, run
from tests.pipeline.used_case import OLD_S, forget_use, lists, used

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

PREVIEW = {"prompt": "a cat", "negative_prompt": "a dog", "steps": 2}


class RecordingLaunch(InProcessLaunch):
    """A launcher that records the used keys before it trains."""

    def __init__(self, cache_dir: Path) -> None:
        super().__init__()
        self.cache_dir = cache_dir
        self.used: set[str] = set()

    def __call__(self, module: str, job_file: Path) -> None:
        self.used = used(self.cache_dir)
        super().__call__(module, job_file)


def entries_read(job: TrainingJob) -> set[str]:
    """Return the keys of all entries of a job, one object at a time."""
    specs = [job.empty_text, *(entry.text for prompt in job.prompts for entry in prompt.entries())]
    for each in job.inputs:
        specs += [caption.entry for caption in each.variants]
        specs += [] if each.empty_text is None else [each.empty_text]
        for view in each.views:
            specs += [view.entry, *view.references, *([] if view.mask is None else [view.mask])]
    return {spec.key for spec in specs}


def test_L13_a_training_records_its_entries_before_it_starts(make_project: Callable[..., Project]) -> None:
    project = make_project(sample_every=6, sample_prompts=[PREVIEW], steps=2)
    launch = RecordingLaunch(project.recipe.cache_dir)
    run(project, launch)
    read = entries_read(read_job(launch.job_files[0]))
    assert read <= launch.used
    previews = {RecipeEntries(project.recipe).text_spec(text).key for text in ("", "a cat", "a dog")}
    assert previews < read


def test_L13_masks_and_references_of_a_run_are_among_its_entries(
    make_project: Callable[..., Project],
) -> None:
    with_both = {"mask": {"path": "masks"}, "references": [{"path": "shapes"}]}
    project = make_project(prediction="klein", datasets={"photos": with_both}, dropout=0)
    with pytest.raises(GateClosedError):
        run(project, InProcessLaunch())  # the stored tables have no masks
    job = project.job()
    assert {"masks", "references"} <= set(job.inputs.table.columns)
    assert entries_read(job) <= used(project.recipe.cache_dir)


def test_L13_a_resumed_run_marks_its_entries_again(make_project: Callable[..., Project]) -> None:
    project = make_project(steps=4)
    launch = RecordingLaunch(project.recipe.cache_dir)
    launch.stop_after = 2
    with pytest.raises(LaunchError):
        run(project, launch)
    forget_use(project.recipe.cache_dir)
    launch.stop_after = None
    assert run(project, launch).report["resumed_from"] == 3
    assert [path for path in lists(project.recipe.cache_dir) if path.stat().st_mtime == OLD_S] == []


def test_L13_a_running_training_keeps_its_entries_marked(
    make_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    class Launch(InProcessLaunch):
        def __call__(self, module: str, job_file: Path) -> None:
            events.append("launched")
            super().__call__(module, job_file)

    kept_marked = KeyLists.kept_marked

    def recorded(self: KeyLists) -> object:
        events.append("kept marked")
        return kept_marked(self)

    monkeypatch.setattr(KeyLists, "kept_marked", recorded)
    run(make_project(steps=1), Launch())
    assert events == ["kept marked", "launched"]


def test_L13_a_training_finds_a_missing_entry_after_it_has_recorded_all(
    make_project: Callable[..., Project],
) -> None:
    """What gc deleted before the training had recorded its keys closes a gate, not step 1,000."""
    project, launch = make_project(), InProcessLaunch()
    entry = next(project.recipe.cache_dir.glob("latents/*/*.safetensors"))
    entry.unlink()
    with pytest.raises(GateClosedError):
        run(project, launch)
    assert entry.stem in used(project.recipe.cache_dir)
    assert launch.job_files == []


def test_L13_a_training_that_cannot_record_its_entries_does_not_start(
    make_project: Callable[..., Project],
) -> None:
    project, launch = make_project(), InProcessLaunch()
    folder = project.recipe.cache_dir / FOLDER
    folder.write_text("not a folder")
    with pytest.raises(StoreError, match="cannot be recorded in the cache") as excinfo:
        run(project, launch)
    assert excinfo.value.where == str(folder)
    assert launch.job_files == []
