"""What a person may start from the page: commands that a terminal could give, which the page shows.

<folder>/
<recipe>.json    process of the job that the page has started: `pid` and `create_time`
<recipe>.log     what the job has printed
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from pipeline.errors import RUN_RECIPE
from pipeline.page.runs import read_runs
from pipeline.processes.launch import python_path
from pipeline.recipe.load import CONFIGS_VARIABLE
from pipeline.storage.atomic import write_text

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

LATENTLINE = (sys.executable, "-P", "-m", "pipeline.cli")
"""The command `latentline`. A folder pipeline/ in the working directory must not hide the module."""

COMMAND_S = 120.0
"""Longest wait for a command that answers at once."""

_LOG_BYTES = 8_000
_LOG_LINES = 12

_RUN = re.compile(r"[0-9A-Za-z]{1,64}")


@dataclass
class Jobs:
    """The jobs that the page has started. They outlive the server, and a later server can stop them.

    Attributes:
        folder: Folder of records and logs.
        command: Start of each command line.
    """

    folder: Path
    command: Sequence[str] = LATENTLINE
    _children: dict[str, subprocess.Popen[bytes]] = field(
        default_factory=dict[str, "subprocess.Popen[bytes]"]
    )

    def start(self, recipe: Recipe) -> str:
        """Start or resume the recipe's job, and return a message for the page."""
        if self.is_running(recipe):
            return "the job is running already"
        runs = read_runs(recipe.output_dir)
        if runs and runs[0].state == "training":
            return "another process trains the recipe already"

        self.folder.mkdir(parents=True, exist_ok=True)
        with self._log(recipe).open("wb") as log:
            # In a new session, so that Ctrl-C for the server does not stop the training.
            process = subprocess.Popen(
                [*self.command, "run", recipe.name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(recipe),
                start_new_session=True,
            )
        self._children[recipe.name] = process
        record = {"pid": process.pid, "create_time": psutil.Process(process.pid).create_time()}
        write_text(self._record(recipe), json.dumps(record))
        return f"started: {start_command(recipe)}"

    def stop(self, recipe: Recipe) -> str:
        """Stop the job as Ctrl-C does: a training saves a checkpoint first. Return a message for the page."""
        process = self._process(recipe)
        if process is None:
            return "the page has started no job that runs; use Ctrl-C in its terminal, or Dagster's UI"
        process.send_signal(signal.SIGINT)
        return "stopping: a training ends after a checkpoint, and the same command resumes it"

    def publish(self, recipe: Recipe, run: str, step: str) -> str:
        """Publish a step of a run, and return the output of the command."""
        # What begins with a dash would be an option.
        if not _RUN.fullmatch(run) or not step.isdecimal():
            return f"run and step must be an id and a number, got {run!r} and {step!r}"
        completed = subprocess.run(
            [*self.command, "export", recipe.name, "--run", run, "--step", step],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=_environment(recipe),
            timeout=COMMAND_S,
            check=False,
        )
        return (completed.stdout + completed.stderr).decode("utf-8", "replace").strip()

    def is_running(self, recipe: Recipe) -> bool:
        """Return whether a job runs that this page or an earlier one has started."""
        return self._process(recipe) is not None

    def last_lines(self, recipe: Recipe) -> list[str]:
        """Return the end of what the last job has printed."""
        try:
            with self._log(recipe).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
                return file.read().decode("utf-8", "replace").splitlines()[-_LOG_LINES:]
        except OSError:
            return []

    def _process(self, recipe: Recipe) -> psutil.Process | None:
        child = self._children.get(recipe.name)
        if child is not None:
            child.poll()  # an ended child keeps its number until then
        try:
            record = json.loads(self._record(recipe).read_text(encoding="utf-8"))
            process = psutil.Process(record["pid"])
            # Another process may have the number by now.
            return process if process.create_time() == record["create_time"] else None
        except (OSError, ValueError, KeyError, psutil.Error):
            return None

    def _log(self, recipe: Recipe) -> Path:
        return self.folder / f"{recipe.name}.log"

    def _record(self, recipe: Recipe) -> Path:
        return self.folder / f"{recipe.name}.json"


def start_command(recipe: Recipe) -> str:
    """Return the command that `Jobs.start` executes."""
    return f"{RUN_RECIPE} {recipe.name}"


def _environment(recipe: Recipe) -> dict[str, str]:
    return {**os.environ, CONFIGS_VARIABLE: str(recipe.source.parent), "PYTHONPATH": python_path()}
