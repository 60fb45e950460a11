"""The progress of a training run, read by the launching process from the files that the worker writes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.reporting.grids import picture_grid
from pipeline.reporting.pictures import jpeg
from pipeline.trained_lora.previews import Preview, read_previews
from pipeline.trained_lora.run_folder import MARKER, Metrics, RunLayout, complete_steps, read_metrics

INTERVAL_S = 30.0
"""Shortest time between two states without a new checkpoint or new previews."""

EVENT_INTERVAL_S = 5.0
"""Shortest time between any two states, in seconds."""

CHECK_S = 1.0
"""Shortest time between two checks of the run's files, in seconds."""

MAX_PROMPTS = 6
"""Maximum number of previews in a live picture."""

MAX_PICTURE_BYTES = 40_000
"""Maximum size of a live picture, which Dagster's event log stores."""


@dataclass(frozen=True)
class LiveState:
    """State of a run during training.

    Attributes:
        step: Number of optimizer steps done.
        metrics: Lines of the metrics file since the previous state; none before the first step.
        checkpoint: Step of a new checkpoint, or None.
        previews: New previews in the order of their prompts.
        validation_loss: Last validation loss of the run, or None.
        validation_gap: Last gap between held-out and trained images of the run, or None.
    """

    step: int
    num_steps: int
    metrics: Sequence[Metrics]
    checkpoint: int | None
    previews: Sequence[Preview]
    validation_loss: float | None
    validation_gap: float | None

    def numbers(self) -> dict[str, int | float]:
        """Return the state as numbers; loss and speed are means over the steps since the previous state."""
        numbers: dict[str, int | float] = {"step": self.step, "steps": self.num_steps}
        if self.metrics:
            # The log rounds the seconds of a step, which may become zero.
            seconds = max(sum(line["seconds"] for line in self.metrics), 1e-9)
            numbers["loss"] = sum(line["loss"] for line in self.metrics) / len(self.metrics)
            numbers["learning_rate"] = self.metrics[-1]["learning_rate"]
            numbers["steps_per_second"] = len(self.metrics) / seconds
            numbers["samples_per_second"] = sum(line["samples"] for line in self.metrics) / seconds
            numbers["memory_gib"] = self.metrics[-1]["memory_bytes"] / 2**30
        if self.validation_loss is not None:
            numbers["validation_loss"] = self.validation_loss
        if self.validation_gap is not None:
            numbers["validation_gap"] = self.validation_gap
        if self.checkpoint is not None:
            numbers["checkpoint"] = self.checkpoint
        return numbers

    def picture(self) -> bytes:
        """Return a JPEG of the new previews with their prompts, or no bytes without previews."""
        shown = self.previews[:MAX_PROMPTS]
        if not shown:
            return b""
        title = f"Previews after step {shown[0].step:,}"
        grid = picture_grid(
            [("", [each.open() for each in shown])], [each.heading for each in shown], title=title
        )
        return jpeg(grid, MAX_PICTURE_BYTES)


class LiveRun:
    """Follows one run from its launch; earlier metrics and files of a resumed run are ignored."""

    def __init__(self, order_file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        job: dict[str, Any] = json.loads(order_file.read_text(encoding="utf-8"))
        self._layout = RunLayout(order_file.parent)
        self._num_steps: int = job["recipe"]["training"]["steps"]
        self._num_prompts = len(job["prompts"])
        self._clock = clock
        self._checked_s = self._reported_s = float("-inf")

        # A resumed run appends to the files of its earlier attempts, which have been reported already.
        self._read_bytes = self._layout.metrics.stat().st_size if self._layout.metrics.is_file() else 0
        self._metrics: list[Metrics] = []
        self._step = 0
        self._seen_checkpoints = self._checkpoints()
        self._seen_previews = {preview.step for preview in self._preview_files()}

    def poll(self, *, final: bool = False) -> LiveState | None:
        """Return the state if it is due, and None otherwise; call it often.

        The first state is due with the first step or preview, later ones after `INTERVAL_S`, or earlier with
        a new checkpoint or new previews. After the end of the worker, `final` returns unreported steps.
        """
        now_s = self._clock()
        if not final and now_s - self._checked_s < CHECK_S:
            return None
        self._checked_s = now_s

        self._read_new_metrics()
        checkpoints = self._checkpoints() - self._seen_checkpoints
        previews = self._new_previews()
        has_event = bool(checkpoints or previews)
        interval_s = 0.0 if final else EVENT_INTERVAL_S if has_event else INTERVAL_S
        if not (self._metrics or has_event) or now_s - self._reported_s < interval_s:
            return None

        self._reported_s = now_s
        self._seen_checkpoints |= checkpoints
        self._seen_previews |= {preview.step for preview in previews}
        metrics, self._metrics = self._metrics, []
        validation = read_metrics(self._layout.validation, self._num_steps + 1)
        return LiveState(
            step=self._step,
            num_steps=self._num_steps,
            metrics=metrics,
            checkpoint=max(checkpoints, default=None),
            previews=previews,
            validation_loss=validation[-1]["loss"] if validation else None,
            validation_gap=validation[-1].get("gap") if validation else None,
        )

    def _read_new_metrics(self) -> None:
        if not self._layout.metrics.is_file():
            return
        with self._layout.metrics.open("rb") as file:
            file.seek(self._read_bytes)
            # The worker may be writing the last line; it is read next time.
            complete_lines = file.read().rpartition(b"\n")[0]
        if complete_lines:
            self._read_bytes += len(complete_lines) + 1
            # A resumed run first ends the line that a killed process left incomplete.
            self._metrics += [json.loads(line) for line in complete_lines.splitlines() if line.endswith(b"}")]
            self._step = self._metrics[-1]["step"] + 1 if self._metrics else self._step

    def _checkpoints(self) -> set[int]:
        return complete_steps(self._layout.checkpoints.glob(f"*/{MARKER}"))

    def _preview_files(self) -> list[Preview]:
        return read_previews(self._layout.previews)

    def _new_previews(self) -> list[Preview]:
        if not self._layout.previews.is_dir():
            return []
        new = [preview for preview in self._preview_files() if preview.step not in self._seen_previews]
        steps = [preview.step for preview in new]

        # A picture with some of the prompts would never be replaced by a complete one.
        complete = [step for step in set(steps) if steps.count(step) == self._num_prompts]
        return [preview for preview in new if complete and preview.step == max(complete)]
