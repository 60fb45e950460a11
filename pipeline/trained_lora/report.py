"""The pictures of a finished run: its loss curve and previews, and the table of its sample losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.reporting.pictures import chart, png
from pipeline.storage.atomic import write_atomically, write_bytes
from pipeline.storage.tables import read_rows, write_rows
from pipeline.trained_lora.export.lora_files import SHEET_FILE
from pipeline.trained_lora.previews import before_after, preview_sheet, read_previews
from pipeline.trained_lora.run_folder import Metrics, RunLayout, read_metrics
from pipeline.trained_lora.sample_losses import sample_statistics

if TYPE_CHECKING:
    from pipeline.trained_lora.job import TrainingJob

CURVE_FILE = "loss.png"
BEFORE_AFTER_FILE = "before_after.jpg"
LOSSES_FILE = "sample_losses.parquet"

FEW_STEPS = 40
"""Number of steps up to which the curve marks each of them."""

NUM_HARDEST = 10
"""Number of hardest samples in the stage's report."""


def write_run_report(job: TrainingJob, layout: RunLayout) -> None:
    """Write loss curve, previews and sample losses of the job's steps into the run's report folder."""
    num_steps = len(job.plan())
    metrics = read_metrics(layout.metrics, num_steps)
    validation = read_metrics(layout.validation, num_steps + 1)

    # A longer run may have the same id, and may have left previews of later steps.
    previews = read_previews(layout.previews, last_step=num_steps)
    pictures = {
        CURVE_FILE: loss_curve(metrics, validation),
        SHEET_FILE: preview_sheet(previews),
        BEFORE_AFTER_FILE: before_after(previews),
    }
    for name, data in pictures.items():
        # No bytes stand for a picture that would show nothing, such as the curve of a single step. A picture
        # that the run wrote when it had another length must not remain.
        if data:
            write_bytes(layout.report / name, data)
        else:
            (layout.report / name).unlink(missing_ok=True)

    table = sample_statistics(job.inputs, layout, num_steps)
    write_atomically(layout.report / LOSSES_FILE, partial(write_rows, table))


def hardest_samples(layout: RunLayout) -> list[dict[str, Any]]:
    """Return the first rows of the run's `LOSSES_FILE`, which lists the hardest samples first."""
    path = layout.report / LOSSES_FILE
    if not path.is_file():
        return []
    columns = ["sample_id", "times", "relative_loss", "deviation"]
    return read_rows(path, columns, limit=NUM_HARDEST).select(columns).to_dicts()


def running_mean(losses: Sequence[float]) -> list[float]:
    """Return the mean over the preceding losses, up to a twentieth of all but at least five."""
    width = max(5, len(losses) // 20)
    return [
        math.fsum(losses[max(0, end - width) : end]) / min(width, end) for end in range(1, len(losses) + 1)
    ]


def loss_curve(metrics: Sequence[Metrics], validation: Sequence[Metrics]) -> bytes:
    """Return a PNG of the loss per step, its running mean, and the losses of validation.

    No bytes if neither curve has two points.
    """
    if max(len(metrics), len(validation)) < 2:
        return b""

    figure, axes = chart(720, 420)
    # Metrics number the steps from 0, validations count the steps done.
    steps, losses = [line["step"] + 1 for line in metrics], [line["loss"] for line in metrics]
    marker = "." if len(steps) <= FEW_STEPS else ""
    if len(steps) > 1:
        axes.plot(steps, losses, marker=marker, color="lightgrey", linewidth=0.8, label="loss per step")
        axes.plot(steps, running_mean(losses), color="tab:blue", label="running mean")

    if len(validation) > 1:
        steps_done = [line["step"] for line in validation]
        losses = [line["loss"] for line in validation]
        axes.plot(steps_done, losses, "o-", color="tab:orange", label="validation")
        # Runs of 0.3.0 and earlier have no pairs.
        pairs = [(line["step"], line["trained_loss"]) for line in validation if "trained_loss" in line]
        if pairs:
            axes.plot(*zip(*pairs, strict=True), ".--", color="tab:green", label="trained images, same noise")

    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("steps")
    axes.set_ylabel("loss")
    axes.legend()
    return png(figure)
