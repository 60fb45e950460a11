"""A small dataset with a tiny model, cached once a session; each test works on a copy of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dagster import AssetSelection, DagsterInstance, ExecuteInProcessResult, materialize
from PIL import Image

from assets.definitions import build_definitions
from pipeline.recipe import Recipe, load_recipe

NAME = "small"
SIZES_HW = ((96, 96), (96, 96), (80, 120), (120, 80), (120, 80))


@dataclass(frozen=True)
class Workspace:
    """A recipe with all its folders below one root.

    Attributes:
        root: Holds data/, cache/, out/ and configs/small.yaml.
        model: The tiny base model, shared by all.
    """

    root: Path
    model: Path

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def out(self) -> Path:
        return self.root / "out"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def file(self) -> Path:
        return self.root / "configs" / f"{NAME}.yaml"

    def recipe(self, **changes: Any) -> Recipe:
        """Write the recipe with other top-level sections, and load it."""
        values: dict[str, Any] = {
            "datasets": [{"name": "photos", "path": str(self.data)}],
            "cache_dir": str(self.cache),
            "output_dir": str(self.out),
            "model": {"base": str(self.model)},
            "buckets": {"resolution": 64, "step": 8, "max_aspect_ratio": 2.0},
            "training": {
                "steps": 4,
                "batch_size": 2,
                "checkpoint_every": 2,
                "sample_every": 0,
                "lora": {"rank": 2, "alpha": 2.0},
            },
            **changes,
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(values, indent=1), encoding="utf-8")
        return load_recipe(self.file)

    def command(self, *arguments: str) -> list[str]:
        """`dagster <arguments>` with this environment's Python."""
        return [sys.executable, "-m", "dagster", *arguments]

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name != "DAGSTER_HOME"}
        return {**kept, "LATENTLINE_CONFIGS": str(self.file.parent), "DO_NOT_TRACK": "1"}

    def start(self, job: str) -> subprocess.Popen[str]:
        """`dagster job execute` of `small_<job>`, from another working directory than the project's."""
        return subprocess.Popen(
            self.command("job", "execute", "-m", "assets.definitions", "-j", f"{NAME}_{job}"),
            env=self.environment(),
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def dagster(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(self.command(*arguments))

    def latentline(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run([sys.executable, "-c", "from pipeline.cli.main import main; main()", *arguments])

    def run(self, command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
        """The command to its end, as `dagster` is run, with more environment variables."""
        return subprocess.run(
            command,
            env={**self.environment(), **variables},
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
        )

    def execute(self, job: str, instance: DagsterInstance | None = None) -> ExecuteInProcessResult:
        """The job in this process, as the recipe's file says."""
        definitions = build_definitions([load_recipe(self.file)])
        return definitions.resolve_job_def(f"{NAME}_{job}").execute_in_process(
            raise_on_error=False, instance=instance
        )

    def select(self, selection: AssetSelection) -> ExecuteInProcessResult:
        """Only what is selected, without what is upstream of it."""
        graph = build_definitions([load_recipe(self.file)]).get_repository_def().asset_graph
        return materialize([*graph.assets_defs], selection=selection, raise_on_error=False)

    def report(self, asset: str) -> dict[str, Any]:
        return json.loads((self.out / "reports" / f"{asset}.json").read_text("utf-8"))

    def entries(self, kind: str) -> list[Path]:
        return sorted((self.cache / kind).glob("*/*.safetensors"))

    def copy_to(self, root: Path) -> Workspace:
        """A workspace of its own with the same data, cache and tables."""
        for name in ("data", "cache", "out"):
            if (self.root / name).exists():
                shutil.copytree(self.root / name, root / name)
        copied = Workspace(root, self.model)
        copied.recipe()
        return copied


def write_photographs(folder: Path) -> None:
    """Smooth random pictures, stored without compression so that an edit keeps the size of the file."""
    folder.mkdir(parents=True)
    for index, (height, width) in enumerate(SIZES_HW):
        rng = np.random.default_rng(index)
        coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(
            folder / f"photo{index}.png", compress_level=0
        )
        (folder / f"photo{index}.txt").write_text(f"a photograph of cat {index}\n", encoding="utf-8")


@pytest.fixture
def fresh(tmp_path: Path, tiny_sd: Path) -> Workspace:
    """Nothing is cached yet."""
    made = Workspace(tmp_path, tiny_sd)
    write_photographs(made.data)
    made.recipe()
    return made


@pytest.fixture(scope="session")
def cached_once(tmp_path_factory: pytest.TempPathFactory, tiny_sd: Path) -> Workspace:
    made = Workspace(tmp_path_factory.mktemp("cached"), tiny_sd)
    write_photographs(made.data)
    made.recipe()
    result = made.execute("cache")
    assert result.success
    return made


@pytest.fixture
def cached(cached_once: Workspace, tmp_path: Path) -> Workspace:
    """The cache job has run; every file is the test's own."""
    return cached_once.copy_to(tmp_path)
