"""What a run looks like: its loss curve, its sample pictures, and the losses of its samples. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.reporting.pictures import chart, jpeg, png
from pipeline.storage.atomic import write_atomically, write_bytes
from pipeline.trained_lora.export.model_card import SHEET_FILE
from pipeline.trained_lora.run_folder import Metrics, RunLayout, read_metrics
from pipeline.trained_lora.sample_losses import sample_statistics

if TYPE_CHECKING:
    from pipeline.trained_lora.job import TrainingJob

CURVE_FILE = "loss.png"
LOSSES_FILE = "sample_losses.parquet"

SHEET_ROWS = 4
CELL_PX = 128
NUM_NAMED = 10


def write_run_report(order: TrainingJob, layout: RunLayout) -> None:
    """Write curve, sheet and table into the run's report folder."""
    steps = len(order.plan())
    metrics, validation = read_metrics(layout.metrics, steps), read_metrics(layout.validation, steps + 1)
    if metrics:
        write_bytes(layout.report / CURVE_FILE, loss_curve(metrics, validation))
    if sheet := sample_sheet(layout.samples):
        write_bytes(layout.report / SHEET_FILE, sheet)
    table = sample_statistics(order.inputs, layout, steps)
    write_atomically(layout.report / LOSSES_FILE, table.write_parquet)


def hardest(layout: RunLayout) -> list[dict[str, Any]]:
    """The first rows of the run's table of sample losses."""
    import polars as pl

    path = layout.report / LOSSES_FILE
    if not path.is_file():
        return []
    columns = ("sample_id", "times", "relative_loss", "deviation")
    return pl.read_parquet(path, columns=list(columns), n_rows=NUM_NAMED).to_dicts()


def smoothed(losses: Sequence[float]) -> list[float]:
    """A mean over about a twentieth of the losses up to each, at least 5 of them where there are so many."""
    width = max(5, len(losses) // 20)
    return [
        math.fsum(losses[max(0, end - width) : end]) / min(width, end) for end in range(1, len(losses) + 1)
    ]


def loss_curve(metrics: Sequence[Metrics], validation: Sequence[Metrics]) -> bytes:
    """A PNG of the loss of each step, its running mean, and the validation loss."""
    figure, axes = chart(720, 420)
    steps, losses = [line["step"] + 1 for line in metrics], [line["loss"] for line in metrics]
    axes.plot(steps, losses, color="lightgrey", linewidth=0.8, label="loss of each step")
    axes.plot(steps, smoothed(losses), color="tab:blue", label="its running mean")
    if validation:
        done = [line["step"] for line in validation]
        axes.plot(done, [line["loss"] for line in validation], "o-", color="tab:orange", label="validation")
    axes.set_xlabel("steps")
    axes.set_ylabel("loss")
    axes.legend()
    return png(figure)


def sample_sheet(folder: Path) -> bytes:
    """A JPEG with a line for each of some of the steps that pictures were drawn at; empty without pictures.

    The first and the last of them are there, and the first few prompts.
    """
    from PIL import Image, ImageDraw

    by_step: dict[int, list[Path]] = {}
    for path in sorted(folder.glob("step-*-*.png")):
        by_step.setdefault(int(path.name.split("-")[1]), []).append(path)
    if not by_step:
        return b""
    steps = sorted(by_step)
    picked = sorted({round(at * (len(steps) - 1) / (SHEET_ROWS - 1)) for at in range(SHEET_ROWS)})
    columns = min(SHEET_ROWS, max(len(paths) for paths in by_step.values()))
    canvas = Image.new("RGB", (80 + columns * CELL_PX, len(picked) * CELL_PX), "white")
    draw = ImageDraw.Draw(canvas)
    for row, at in enumerate(picked):
        draw.text((6, row * CELL_PX + CELL_PX // 2), f"step {steps[at]}", fill="black")
        for column, path in enumerate(by_step[steps[at]][:columns]):
            with Image.open(path) as picture:
                small = picture.convert("RGB")
                small.thumbnail((CELL_PX - 4, CELL_PX - 4))
                canvas.paste(small, (80 + column * CELL_PX, row * CELL_PX))
    return jpeg(canvas)
