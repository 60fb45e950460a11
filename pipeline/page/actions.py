"""What a person may start from the page: commands that a terminal could give, which the page shows.

<folder>/
<recipe>.json         process of the job that the page has started: `pid` and `create_time`
<recipe>.log          what the job has printed
<recipe>.draw.json    the same for `latentline sample`
<recipe>.draw.log
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
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

COMMAND_S = 300.0
"""Longest wait for a command that answers at once."""

DRAW = ".draw"
"""Kind of the process that draws a prompt."""

MAX_PROMPT_CHARACTERS = 10_000

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
        self._launch(recipe, ["run", recipe.name])
        return f"started: {start_command(recipe)}"

    def draw(self, recipe: Recipe, fields: Mapping[str, str]) -> str:
        """Start drawing a prompt with a saved step of a run, and return a message for the page.

        Args:
            recipe: The recipe.
            fields: `prompt`, `run`, `step` (empty for the newest one), `strength` and `seed` (empty for the
                recipe's), as a person has typed them.
        """
        if self.is_running(recipe, DRAW):
            return "the picture before it is still being drawn"
        run, step = fields.get("run", ""), fields.get("step", "")
        steps = {each.name: each.saved_steps for each in read_runs(recipe.output_dir)}.get(run, [])
        step = step or str(max(steps, default=""))
        if step not in map(str, steps):
            return f"run and step must be of a saved checkpoint, got {run!a} and {step!a}"
        # A program cannot be started with zero bytes or long texts among its arguments.
        fields = {name: text.replace("\0", "").strip() for name, text in fields.items()}
        prompt = fields.get("prompt", "")
        if not 0 < len(prompt) <= MAX_PROMPT_CHARACTERS:
            return f"the prompt must have 1 to {MAX_PROMPT_CHARACTERS:,} characters, got {len(prompt):,}"
        arguments = ["sample", recipe.name, "--run", run, "--step", step, f"--prompt={prompt}"]
        # With an equals sign, what begins with a dash is no option. The command verifies the numbers.
        options = ("strength", "seed")
        arguments += [f"--{name}={fields[name]}" for name in options if fields.get(name)]
        self._launch(recipe, arguments, DRAW)
        return f"started: {shlex.join(['latentline', *arguments])}"

    def _launch(self, recipe: Recipe, arguments: Sequence[str], kind: str = "") -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._log(recipe, kind).open("wb") as log:
            # In a new session, so that Ctrl-C for the server does not stop the training.
            process = subprocess.Popen(
                [*self.command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(recipe),
                start_new_session=True,
            )
        self._children[recipe.name + kind] = process
        record = {"pid": process.pid, "create_time": psutil.Process(process.pid).create_time()}
        write_text(self._record(recipe, kind), json.dumps(record))

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
        try:
            completed = subprocess.run(
                [*self.command, "export", recipe.name, "--run", run, "--step", step],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env=_environment(recipe),
                timeout=COMMAND_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"stopped: latentline export has not ended within {COMMAND_S:g} s; use a terminal"
        return (completed.stdout + completed.stderr).decode("utf-8", "replace").strip()

    def is_running(self, recipe: Recipe, kind: str = "") -> bool:
        """Return whether a process runs that this page or an earlier one has started: the job, or `DRAW`."""
        return self._process(recipe, kind) is not None

    def last_lines(self, recipe: Recipe, kind: str = "") -> list[str]:
        """Return the end of what the last job, or the last `DRAW`, has printed."""
        try:
            with self._log(recipe, kind).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
                return file.read().decode("utf-8", "replace").splitlines()[-_LOG_LINES:]
        except OSError:
            return []

    def _process(self, recipe: Recipe, kind: str = "") -> psutil.Process | None:
        child = self._children.get(recipe.name + kind)
        if child is not None:
            child.poll()  # an ended child keeps its number until then
        try:
            record = json.loads(self._record(recipe, kind).read_text(encoding="utf-8"))
            process = psutil.Process(record["pid"])
            # Another process may have the number by now.
            return process if process.create_time() == record["create_time"] else None
        except (OSError, ValueError, KeyError, psutil.Error):
            return None

    def _log(self, recipe: Recipe, kind: str) -> Path:
        return self.folder / f"{recipe.name}{kind}.log"

    def _record(self, recipe: Recipe, kind: str) -> Path:
        return self.folder / f"{recipe.name}{kind}.json"


def start_command(recipe: Recipe) -> str:
    """Return the command that `Jobs.start` executes."""
    return f"{RUN_RECIPE} {recipe.name}"


def _environment(recipe: Recipe) -> dict[str, str]:
    return {**os.environ, CONFIGS_VARIABLE: str(recipe.source.parent), "PYTHONPATH": python_path()}
