"""What the race needs of a trainer: its command, and the number of finished steps in its output."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Task:
    """What each trainer does, in float32 on the CPU or GPU that it chooses, with batch size 1.

    Attributes:
        base: Base model in diffusers' layout.
        num_photographs: Number of photographs in `Place.photos`.
        edge: Resolution in pixels; buckets have about edge x edge pixels.
        rank: Rank and alpha of the LoRA.
        steps: Number of steps after which a run is stopped.
    """

    base: Path
    num_photographs: int
    edge: int
    rank: int
    steps: int


@dataclass(frozen=True)
class Place:
    """Folders of one trainer.

    Attributes:
        folder: Caches and output; new before each cold run.
        photos: Photographs of this trainer, because some write their caches next to the images.
        kept: Folder that is not removed before a cold run, for what a user has once per machine.
    """

    folder: Path
    photos: Path
    kept: Path


@dataclass(frozen=True)
class Start:
    """A command that trains.

    Attributes:
        command: Program and arguments.
        steps: Returns the number of finished steps from the end of the output.
        cwd: Working directory.
        variables: Additional environment variables.
        max_s: Longest time until the last step, in seconds.
    """

    command: list[str]
    steps: Callable[[str], int]
    cwd: Path
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    max_s: float = 600.0


@dataclass(frozen=True)
class Trainer:
    """A trainer in the race.

    Attributes:
        name: Name in the table.
        version: Commit of the checkout.
        start: Writes the configuration for a task and a seed, and returns the command.
        note: Difference from the other trainers that a reader of the table must know.
    """

    name: str
    version: str
    start: Callable[[Task, Place, int], Start]
    note: str = ""


def steps_by(pattern: str) -> Callable[[str], int]:
    """Return a function that finds the last match of `pattern` and returns its first group as a number."""
    compiled = re.compile(pattern)

    def steps(output: str) -> int:
        counts = compiled.findall(output)
        return int(counts[-1]) if counts else 0

    return steps


def checkout_python(checkout: Path) -> str:
    """Return the Python of the virtual environment in a checkout.

    Raises:
        FileNotFoundError: If the checkout has none.
    """
    for name in (".venv", "venv"):
        if (python := checkout / name / "bin" / "python").exists():
            return str(python)
    raise FileNotFoundError(
        f"{checkout} needs a virtual environment with the trainer's requirements, got neither .venv nor "
        "venv. Install the trainer there as its README says."
    )


def checkout_version(checkout: Path) -> str:
    """Return the checkout's commit, followed by "+" if tracked files have changes."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    if Path(git("rev-parse", "--show-toplevel") or "/") != checkout.resolve():
        return "unknown"
    modified = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "--short", "HEAD") + ("+" if modified else "")
