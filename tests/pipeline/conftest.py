"""Fixtures: a dataset folder with the first stages, and a project with a complete cache."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from demo.tiny_models import make_tiny_qwen_image_edit
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.cached_job import Job, recipe_of
from tests.pipeline.dataset_folder import Folder
from tests.pipeline.disk_calls import DiskCalls


@pytest.fixture(scope="session")
def tiny_edit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny Qwen-Image-Edit, whose text encoder sees references."""
    folder = tmp_path_factory.mktemp("models") / "edit"
    make_tiny_qwen_image_edit(folder)
    return folder


@pytest.fixture
def progress_lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list for the lines of a log; work of any length then writes at least its last line."""
    monkeypatch.setattr("pipeline.reporting.progress.FIRST_LINE_S", 0.0)
    return []


@pytest.fixture
def disk_calls(monkeypatch: pytest.MonkeyPatch) -> DiskCalls:
    return DiskCalls(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    root = tmp_path / "data"
    root.mkdir()
    return Folder(root, tmp_path / "out")


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after whose call scanned files are trusted, as if the clock had ticked."""

    def pass_time() -> None:
        monkeypatch.setattr("pipeline.raw_images.stage.CLOCK_GRANULARITY_NS", -(10**18))

    return pass_time


@pytest.fixture(scope="session")
def finished(
    shared_folder: Callable[[str, Callable[[Path], object]], Path], photos_once: Path, tiny_sd: Path
) -> Path:
    """Return the root of a project with a complete cache, from which `job` copies."""

    def build(root: Path) -> None:
        shutil.copytree(photos_once, root / "photos")
        Job(recipe_of(root, tiny_sd), InProcessLaunch()).run()

    return shared_folder("finished job", build)


@pytest.fixture(scope="module")
def module_entries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the entries of the module's first job, which later jobs do not encode again."""
    return tmp_path_factory.mktemp("entries") / "cache"


@pytest.fixture
def job(tmp_path: Path, tiny_sd: Path, in_process_launch: InProcessLaunch, finished: Path) -> Job:
    """Return a copy of a project with a complete cache, which the test may change."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    cached_job = Job(recipe_of(tmp_path, tiny_sd), in_process_launch)
    cached_job.cache()  # encodes nothing, but records the stats of the copies
    assert in_process_launch.modules == []
    return cached_job


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder into which `latentline new` writes recipes."""
    folder = tmp_path / "configs"
    monkeypatch.setenv("LATENTLINE_CONFIGS", str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return folder
