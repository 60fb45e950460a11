"""The folder of one training run: where things lie in it, and its metrics.

The files below `logs` are only ever appended to. A run that resumes, or is asked for fewer steps, may write a
step again; the last line of a step is the one that counts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Metrics = dict[str, Any]
"""`step` (from 0), `epoch`, `samples`, `loss`, `learning_rate`, `grad_norm`, `seconds`, `memory_bytes`."""


def run_folder(output_dir: Path, run: str) -> Path:
    """`output_dir/runs/<run>`."""
    return output_dir / "runs" / run


@dataclass(frozen=True)
class RunLayout:
    """The paths below `output_dir/runs/<run>`; nothing is read or made."""

    folder: Path

    @property
    def facts(self) -> Path:
        """What the run's id is the hash of, in words."""
        return self.folder / "run.json"

    @property
    def result(self) -> Path:
        """What the launched processes say they did."""
        return self.folder / "result.json"

    @property
    def finished(self) -> Path:
        """The marker of a finished run: the result, and the hash of each exported file."""
        return self.folder / "finished.json"

    @property
    def lock(self) -> Path:
        """Held by whoever trains the run."""
        return self.folder / "lock"

    @property
    def checkpoints(self) -> Path:
        """One folder a checkpoint."""
        return self.folder / "checkpoints"

    @property
    def exported(self) -> Path:
        """The LoRA files of this run, before they are published."""
        return self.folder / "lora"

    @property
    def metrics(self) -> Path:
        """A line for each step."""
        return self.folder / "logs" / "metrics.jsonl"

    @property
    def sample_losses(self) -> Path:
        """A line for each step: `losses` and `timesteps` of its samples, in the plan's order.

        `samples` are their numbers: rows of inputs.parquet, from 0.
        """
        return self.folder / "logs" / "sample_losses.jsonl"

    @property
    def validation(self) -> Path:
        """A line for each measurement: `step` (steps done), `loss`, and `by_level`."""
        return self.folder / "logs" / "validation.jsonl"

    @property
    def samples(self) -> Path:
        """The sample pictures."""
        return self.folder / "samples"

    @property
    def report(self) -> Path:
        """Pictures and tables of the finished run."""
        return self.folder / "report"

    @property
    def last_good(self) -> Path:
        """The LoRA files from before a step that failed; absent where none did."""
        return self.folder / "last_good_lora"


def checkpoint_list(layout: RunLayout) -> list[dict[str, Any]]:
    """A row for each checkpoint that is kept, the newest first: its `step`, and its `bytes` in all files.

    What is still being written, or was left by a process that was killed, is none.
    """
    rows: list[dict[str, Any]] = []
    for marker in sorted(layout.checkpoints.glob("step-*/COMPLETE"), reverse=True):
        files = [path for path in marker.parent.rglob("*") if path.is_file()]
        step = int(marker.parent.name.removeprefix("step-"))
        rows.append({"step": step, "bytes": sum(path.stat().st_size for path in files)})
    return rows


def read_metrics(path: Path, num_steps: int) -> list[Metrics]:
    """The last line of each step below `num_steps` that has one, by step; torn lines are passed over."""
    if not path.is_file():
        return []
    by_step: dict[int, Metrics] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            metrics = json.loads(line)
            by_step[int(metrics["step"])] = metrics
        except (ValueError, KeyError, TypeError):
            continue
    return [by_step[step] for step in sorted(by_step) if step < num_steps]
