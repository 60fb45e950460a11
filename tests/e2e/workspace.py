"""A small dataset with a tiny model, and the commands that tests run on it."""

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
from dagster import AssetSelection, DagsterInstance, Definitions, ExecuteInProcessResult, define_asset_job
from PIL import Image

from assets.definitions import build_definitions
from assets.names import LAUNCHER_RESOURCE
from pipeline.recipe import Recipe, load_recipe
from tests.in_process_launcher import InProcessLauncher

NAME = "small"
SIZES_HW = ((96, 96), (96, 96), (80, 120), (120, 80), (120, 80))


@dataclass(frozen=True)
class Workspace:
    """A recipe with all its folders below one root.

    Attributes:
        root: Folder that contains data/, cache/, out/ and configs/small.yaml.
        model: Folder of the tiny base model, which all tests share.
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
        """Write the recipe with `changes` to its top-level sections, and load it."""
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
                "lora": {"rank": 2, "alpha": 2.0, "modules": ["mid_block.*.to_q"]},
            },
            **changes,
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(values, indent=1), encoding="utf-8")
        return load_recipe(self.file)

    def command(self, *arguments: str) -> list[str]:
        """Return `dagster <arguments>` for this environment's Python."""
        return [sys.executable, "-m", "dagster", *arguments]

    def environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name != "DAGSTER_HOME"}
        return {**inherited, "LATENTLINE_CONFIGS": str(self.file.parent), "DO_NOT_TRACK": "1"}

    def start(self, job: str) -> subprocess.Popen[str]:
        """Start `dagster job execute` of `small_<job>` from a working directory outside of the project."""
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
        """Run the command with additional environment variables, and wait for its end."""
        return subprocess.run(
            command,
            env={**self.environment(), **variables},
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
        )

    def execute(
        self, job: str, instance: DagsterInstance | None = None, run_config: dict[str, Any] | None = None
    ) -> ExecuteInProcessResult:
        """Execute the job in this process, encoders and training included, with the recipe in the file."""
        return self._execute(self.definitions(), f"{NAME}_{job}", instance, run_config)

    def select(
        self, selection: AssetSelection, instance: DagsterInstance | None = None
    ) -> ExecuteInProcessResult:
        """Materialize the selection in this process, without its upstream assets."""
        job = define_asset_job("selected", selection)
        definitions = Definitions.merge(self.definitions(), Definitions(jobs=[job]))
        return self._execute(definitions, "selected", instance)

    def definitions(self) -> Definitions:
        """Return the definitions of the recipe in the file."""
        return build_definitions([load_recipe(self.file)])

    def _execute(
        self,
        definitions: Definitions,
        job: str,
        instance: DagsterInstance | None,
        run_config: dict[str, Any] | None = None,
    ) -> ExecuteInProcessResult:
        return definitions.resolve_job_def(job).execute_in_process(
            raise_on_error=False,
            instance=instance,
            run_config=run_config,
            resources={LAUNCHER_RESOURCE: InProcessLauncher()},
        )

    def report(self, asset: str) -> dict[str, Any]:
        return json.loads((self.out / "reports" / f"{asset}.json").read_text("utf-8"))

    def entries(self, kind: str) -> list[Path]:
        return sorted((self.cache / kind).glob("*/*.safetensors"))

    def copy_to(self, root: Path) -> Workspace:
        """Copy data, cache and tables to a new workspace."""
        for name in ("data", "cache", "out"):
            if (self.root / name).exists():
                shutil.copytree(self.root / name, root / name)
        workspace = Workspace(root, self.model)
        workspace.recipe()
        return workspace


def write_photographs(folder: Path) -> None:
    """Write smooth random pictures. They are not compressed, so that an edit keeps the file size."""
    folder.mkdir(parents=True)
    for index, (height, width) in enumerate(SIZES_HW):
        rng = np.random.default_rng(index)
        coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(
            folder / f"photo{index}.png", compress_level=0
        )
        (folder / f"photo{index}.txt").write_text(f"a photograph of cat {index}\n", encoding="utf-8")
