"""Fixtures: a dataset folder with the first stages, and a project with a complete cache."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from demo.tiny_models import make_tiny_qwen_image_edit
from pipeline.aspect_buckets.stage import assign_buckets
from pipeline.raw_images.stage import scan
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.reporting.reports import StageResult, write_report
from pipeline.storage.tables import Tables
from pipeline.validated_dataset.stage import validate
from tests.conftest import InProcessLaunch
from tests.pipeline.bind_mounts import bind
from tests.pipeline.cache_case import cache, entry_bytes
from tests.pipeline.cached_job import Job, recipe_of
from tests.pipeline.disk_calls import DiskCalls

__all__ = ["bind", "cache", "entry_bytes"]  # fixtures


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


def picture(seed: int = 0, height: int = 24, width: int = 40, kind: str = "PNG") -> bytes:
    """Return the bytes of a small image of random pixels, which depend only on the seed and the size."""
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(levels).save(file, kind)
    return file.getvalue()


@dataclass
class Folder:
    """A dataset folder, its recipe, and the stages up to aspect_buckets; tests use the fixture `folder`."""

    root: Path
    output_dir: Path
    captions: dict[str, object] = field(default_factory=dict[str, object])
    dataset: dict[str, object] = field(default_factory=dict[str, object])
    checks: dict[str, object] = field(default_factory=dict[str, object])
    log: list[str] = field(default_factory=list[str])
    duplicates: str = "keep_first"
    validation_fraction: float = 0.0
    model: str = "no model"

    @property
    def recipe(self) -> Recipe:
        return recipe_from_mapping(
            "small",
            {
                "datasets": [
                    {
                        "name": "d",
                        "path": str(self.root),
                        "captions": self.captions,
                        "duplicates": self.duplicates,
                        "validation_fraction": self.validation_fraction,
                        **self.dataset,
                    }
                ],
                "cache_dir": str(self.output_dir / "cache"),
                "output_dir": str(self.output_dir),
                "model": {"base": self.model},
                "buckets": {"resolution": 64, "step": 8},
                "checks": self.checks,
            },
        )

    @property
    def tables(self) -> Tables:
        return Tables(self.output_dir)

    @staticmethod
    def picture(seed: int = 0, height: int = 24, width: int = 40, kind: str = "PNG") -> bytes:
        return picture(seed, height, width, kind)

    def add(self, name: str, data: bytes | None = None, caption: str | bytes | None = "a caption") -> Path:
        """Write an image and its sidecar caption; by default the file's name is the seed of its pixels."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(sum(os.fsencode(name))) if data is None else data)
        if caption is not None:
            text = caption if isinstance(caption, bytes) else caption.encode()
            path.with_suffix(".txt").write_bytes(text)
        return path

    def scan(self) -> StageResult:
        return self._written("raw_images", scan(self.recipe, self.tables, log=self.log.append))

    def validate(self) -> StageResult:
        raw = self.tables.read("raw_images")
        result = validate(self.recipe, raw, self.tables, log=self.log.append)
        return self._written("validated_dataset", result)

    def assign(self) -> StageResult:
        result = assign_buckets(self.recipe, self.tables.read("validated_dataset"), log=self.log.append)
        return self._written("aspect_buckets", result)

    def ingest(self) -> StageResult:
        self.scan()
        return self.validate()

    def _written(self, asset: str, result: StageResult) -> StageResult:
        self.tables.write(asset, result.table)
        self.tables.write_rejected(asset, result.rejected)
        write_report(self.output_dir, asset, result.report)
        return result


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


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the results of the module's first job, from which later tests copy."""
    return tmp_path_factory.mktemp("finished") / "root"


@pytest.fixture
def job(
    tmp_path: Path, photos: Path, tiny_sd: Path, in_process_launch: InProcessLaunch, finished: Path
) -> Job:
    """Return a project with a complete cache. A module's first test encodes, later ones get a copy."""
    cached_job = Job(recipe_of(tmp_path, tiny_sd), in_process_launch)
    if finished.is_dir():
        shutil.rmtree(photos)
        shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
        shutil.rmtree(tmp_path / "cache" / "outputs")  # contains paths of the first test
        cached_job.cache()  # encodes nothing, but records the stats of the copies
        assert in_process_launch.modules == []
    else:
        cached_job.run()
        shutil.copytree(tmp_path, finished)
    return cached_job


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder into which `latentline new` writes recipes."""
    folder = tmp_path / "configs"
    monkeypatch.setenv("LATENTLINE_CONFIGS", str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return folder
