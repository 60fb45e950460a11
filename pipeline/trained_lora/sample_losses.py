"""Which images are hard: what the losses of a run say of each sample. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from pipeline.trained_lora.run_folder import read_metrics

if TYPE_CHECKING:
    import numpy.typing as npt

    from pipeline.trained_lora.run_folder import RunLayout
    from pipeline.trained_lora.samples import TrainingInputs

MIN_DRAWS_A_BIN = 25
MAX_BINS = 20

COLUMNS: dict[str, Any] = {
    "sample_id": pl.String,
    "caption": pl.String,
    "times": pl.Int32,
    "mean_loss": pl.Float64,
    "relative_loss": pl.Float64,
    "deviation": pl.Float64,
}


def sample_statistics(inputs: TrainingInputs, layout: RunLayout, num_steps: int) -> pl.DataFrame:
    """One row a sample that was trained on, the hardest first.

    A loss depends on the noise level far more than on the image, so each is first divided by the mean loss of
    all samples at about its timestep.

    Columns: `times` it was drawn; `mean_loss`; `relative_loss`, the mean of those quotients, 1 for an
    ordinary image; `deviation`, how many standard errors that is from 1. What is far above is hard, or has a
    caption that is not its own.

    Args:
        inputs: The run's samples; those that are trained on are in the order of their numbers.
        layout: Of the run.
        num_steps: Steps that count.
    """
    draws = _draws(layout, num_steps)
    if draws.is_empty():
        return pl.DataFrame(schema=COLUMNS)
    spread = float(np.std(draws["relative"].to_numpy())) or 1.0
    table = draws.group_by("number").agg(
        times=pl.len().cast(pl.Int32),
        mean_loss=pl.col("loss").mean(),
        relative_loss=pl.col("relative").mean(),
    )
    trained = inputs.trained.table
    table = table.with_columns(
        sample_id=trained["variant_id"].gather(table["number"]),
        caption=trained["captions"].gather(table["number"]).list.first(),
        deviation=(pl.col("relative_loss") - 1) / spread * pl.col("times").sqrt(),
    )
    return table.select(*COLUMNS).sort(["deviation", "sample_id"], descending=[True, False])


def loss_trend(layout: RunLayout, num_steps: int) -> dict[str, float] | None:
    """Means of the first and the last fifth of the relative losses, as `sample_statistics` has them.

    Returns:
        `first`, `last`, and `error`, the standard error of their difference; None without losses.
    """
    relative = _draws(layout, num_steps)["relative"].to_numpy()
    if not len(relative):
        return None
    fifth = max(1, len(relative) // 5)
    first, last = relative[:fifth], relative[-fifth:]
    error = float(np.sqrt((np.var(first) + np.var(last)) / fifth))
    return {"first": float(np.mean(first)), "last": float(np.mean(last)), "error": error}


def _draws(layout: RunLayout, num_steps: int) -> pl.DataFrame:
    """`number` of the sample, `loss`, and the loss `relative` to what is usual at its timestep; in order."""
    numbers: list[int] = []
    timesteps: list[float] = []
    losses: list[float] = []
    for line in read_metrics(layout.sample_losses, num_steps):
        numbers += line["samples"]
        timesteps += line["timesteps"]
        losses += line["losses"]
    values = np.asarray(losses, dtype=np.float64)
    relative = values / _expected(np.asarray(timesteps), values) if losses else values
    schema = {"number": pl.Int64, "loss": pl.Float64, "relative": pl.Float64}
    return pl.DataFrame({"number": numbers, "loss": values, "relative": relative}, schema=schema)


def _expected(timesteps: npt.NDArray[np.float64], losses: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The mean loss of the draws whose timesteps are nearest, in groups of equal number."""
    bins = int(np.clip(len(losses) // MIN_DRAWS_A_BIN, 1, MAX_BINS))
    ranks = np.argsort(np.argsort(timesteps, kind="stable"), kind="stable")
    group = ranks * bins // len(losses)
    sums = np.bincount(group, weights=losses, minlength=bins)
    means = sums / np.bincount(group, minlength=bins)
    return np.maximum(means[group], np.finfo(np.float64).tiny)
