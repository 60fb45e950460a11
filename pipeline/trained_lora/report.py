"""The report of a run: its loss curve, a sheet of its previews, and the losses of its samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.reporting.pictures import chart, jpeg, png
from pipeline.storage.atomic import write_atomically, write_bytes
from pipeline.trained_lora.export.lora_files import SHEET_FILE
from pipeline.trained_lora.run_folder import Metrics, RunLayout, read_metrics
from pipeline.trained_lora.sample_losses import sample_statistics

if TYPE_CHECKING:
    from pipeline.trained_lora.job import TrainingJob

CURVE_FILE = "loss.png"
LOSSES_FILE = "sample_losses.parquet"

SHEET_ROWS = 4
"""Maximum number of steps on the preview sheet."""

CELL_PX = 128
"""Edge of a preview on the sheet."""

NUM_HARDEST = 10
"""Number of hardest samples in the stage's report."""

_LABEL_PX = 80
_CELL_MARGIN_PX = 4


def write_run_report(job: TrainingJob, layout: RunLayout) -> None:
    """Write loss curve, preview sheet and sample losses into the run's report folder."""
    num_steps = len(job.plan())
    metrics = read_metrics(layout.metrics, num_steps)
    validation = read_metrics(layout.validation, num_steps + 1)
    if metrics:
        write_bytes(layout.report / CURVE_FILE, loss_curve(metrics, validation))
    if sheet := preview_sheet(layout.samples):
        write_bytes(layout.report / SHEET_FILE, sheet)
    table = sample_statistics(job.inputs, layout, num_steps)
    write_atomically(layout.report / LOSSES_FILE, table.write_parquet)


def hardest_samples(layout: RunLayout) -> list[dict[str, Any]]:
    """Return the first rows of the run's `LOSSES_FILE`, which lists the hardest samples first."""
    path = layout.report / LOSSES_FILE
    if not path.is_file():
        return []
    columns = ["sample_id", "times", "relative_loss", "deviation"]
    return pl.read_parquet(path, columns=columns, n_rows=NUM_HARDEST).to_dicts()


def running_mean(losses: Sequence[float]) -> list[float]:
    """Return the mean over the preceding losses, up to a twentieth of all but at least five."""
    width = max(5, len(losses) // 20)
    return [
        math.fsum(losses[max(0, end - width) : end]) / min(width, end) for end in range(1, len(losses) + 1)
    ]


def loss_curve(metrics: Sequence[Metrics], validation: Sequence[Metrics]) -> bytes:
    """Return a PNG of the loss per step, its running mean, and the validation loss."""
    figure, axes = chart(720, 420)
    steps, losses = [line["step"] + 1 for line in metrics], [line["loss"] for line in metrics]
    axes.plot(steps, losses, color="lightgrey", linewidth=0.8, label="loss per step")
    axes.plot(steps, running_mean(losses), color="tab:blue", label="running mean")

    if validation:
        steps_done = [line["step"] for line in validation]
        losses = [line["loss"] for line in validation]
        axes.plot(steps_done, losses, "o-", color="tab:orange", label="validation")

    axes.set_xlabel("steps")
    axes.set_ylabel("loss")
    axes.legend()
    return png(figure)


def preview_sheet(folder: Path) -> bytes:
    """Return a JPEG of previews, or no bytes if there are none.

    Each row shows the first few prompts at one step. Rows are spread evenly from the first step with previews
    to the last.
    """
    from PIL import Image, ImageDraw

    by_step: dict[int, list[Path]] = {}
    for path in sorted(folder.glob("step-*-*.png")):
        by_step.setdefault(int(path.name.split("-")[1]), []).append(path)
    if not by_step:
        return b""

    steps = sorted(by_step)
    shown = sorted({round(row * (len(steps) - 1) / (SHEET_ROWS - 1)) for row in range(SHEET_ROWS)})
    num_columns = min(SHEET_ROWS, max(len(paths) for paths in by_step.values()))
    canvas = Image.new("RGB", (_LABEL_PX + num_columns * CELL_PX, len(shown) * CELL_PX), "white")
    draw = ImageDraw.Draw(canvas)

    for row, index in enumerate(shown):
        step = steps[index]
        draw.text((6, row * CELL_PX + CELL_PX // 2), f"step {step}", fill="black")
        for column, path in enumerate(by_step[step][:num_columns]):
            with Image.open(path) as preview:
                thumbnail = preview.convert("RGB")
            thumbnail.thumbnail((CELL_PX - _CELL_MARGIN_PX, CELL_PX - _CELL_MARGIN_PX))
            canvas.paste(thumbnail, (_LABEL_PX + column * CELL_PX, row * CELL_PX))
    return jpeg(canvas)
