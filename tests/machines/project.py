"""A recipe with its folders on the disk of a machine, and commands on it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.daemon import SETTINGS
from tests.e2e.workspace import write_photographs
from tests.machines.children import Child
from tests.machines.machine import Machine

NAME = "small"

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Project:
    """The recipe `small` on a machine.

    Attributes:
        machine: Machine with the folders.
        model: Folder of the tiny base model, a program file that all machines share.
        cache: Address of the cache.
        environment: Variables of all commands.
    """

    machine: Machine
    model: Path
    cache: str
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def data(self) -> Path:
        """Folder of the images, as the test sees it."""
        return self.machine.path("data")

    def prepare(self, storage: str, **changes: Any) -> None:
        """Write images, recipe and DAGSTER_HOME.

        Args:
            storage: Lines of dagster.yaml with the database.
            changes: Top-level sections of the recipe.
        """
        write_photographs(self.data)
        self.write_recipe(**changes)
        self.deploy()
        self.machine.path("dagster").mkdir()
        # Runs are checked every second, so that a short run is checked several times.
        settings = SETTINGS.read_text("utf-8").replace(
            "poll_interval_seconds: 10", "poll_interval_seconds: 1"
        )
        self.machine.path("dagster/dagster.yaml").write_text(f"{settings}\n{storage}", "utf-8")

    def write_recipe(self, **changes: Any) -> None:
        """Write the recipe with `changes` to its top-level sections."""
        disk = self.machine.disk
        values: dict[str, Any] = {
            "datasets": [{"name": "photos", "path": str(disk / "data")}],
            "cache_dir": self.cache,
            "output_dir": str(disk / "out"),
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
        file = self.machine.path(f"configs/{NAME}.yaml")
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(values, indent=1), encoding="utf-8")

    def deploy(self, **settings: Any) -> None:
        """Write the deployment file: working copies are on the machine's disk, not in the shared project."""
        values = {"scratch": str(self.machine.disk / "scratch"), **settings}
        self.machine.path("deployment.yaml").write_text(json.dumps(values), encoding="utf-8")

    def latentline(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `latentline <arguments>` on the machine."""
        return self.machine.run(latentline(*arguments), **self.variables(), **environment)

    def materialize(self, asset: str) -> subprocess.CompletedProcess[str]:
        """Execute the step of one asset on the machine, without those before it."""
        return self.machine.run(step_of(asset), **self.variables())

    def start(self, command: Sequence[str], *, log: str) -> Child:
        """Start a command on the machine, with its output in the file `log` of the disk."""
        return self.machine.start(command, log=log, **self.variables())

    def variables(self) -> dict[str, str]:
        """Return the variables of the project's commands."""
        disk = self.machine.disk
        folders = {"DAGSTER_HOME": str(disk / "dagster"), "LATENTLINE_CONFIGS": str(disk / "configs")}
        folders["LATENTLINE_DEPLOYMENT"] = str(disk / "deployment.yaml")
        return {**folders, "PYTHONPATH": str(ROOT), **self.environment}

    def report(self, asset: str) -> dict[str, Any]:
        """Return the report of the last run of an asset."""
        return json.loads(self.machine.path(f"out/reports/{asset}.json").read_text("utf-8"))


def step_of(asset: str) -> list[str]:
    """Return the command that executes the step of one asset."""
    dagster = [sys.executable, "-m", "dagster", "asset", "materialize", "-m", "assets.definitions"]
    return [*dagster, "--select", f"{NAME}/{asset}"]


def latentline(*arguments: str) -> list[str]:
    """Return the command `latentline <arguments>`."""
    return [sys.executable, "-c", "from pipeline.cli.main import main; main()", *arguments]
