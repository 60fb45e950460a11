"""Hard samples and the loss trend, from the loss of every sample in every step of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from pipeline.trained_lora.run_folder import read_metrics

if TYPE_CHECKING:
    import numpy.typing as npt

    from pipeline.trained_lora.inputs import TrainingInputs
    from pipeline.trained_lora.run_folder import RunLayout

MIN_DRAWS_PER_BIN = 25
"""Minimum number of losses for their mean to be the expected loss at a timestep."""

MAX_BINS = 20
"""Maximum number of groups into which timesteps are divided."""

COLUMNS: dict[str, Any] = {
    "sample_id": pl.String,
    "caption": pl.String,
    "times": pl.Int32,
    "mean_loss": pl.Float64,
    "relative_loss": pl.Float64,
    "deviation": pl.Float64,
}
"""Columns of the table of sample losses, one row per training input.

`times` counts the draws. `relative_loss` is the mean loss relative to the expected loss at the same noise
levels, so 1 is an average image. `deviation` is its distance from the mean of all images, in standard
deviations of what images of this dataset with as many draws usually have: by definition, its spread is 1.

A high value means that the image differs from what the model expects, as detailed and rare images do too. A
wrong caption is one reason of several: `latentline diagnose` tests captions.
"""


def sample_statistics(inputs: TrainingInputs, layout: RunLayout, num_steps: int) -> pl.DataFrame:
    """Return a table of `COLUMNS` for all inputs that were trained on, hardest first."""
    draws = _draws(layout, num_steps)
    if draws.is_empty():
        return pl.DataFrame(schema=COLUMNS)

    # In the order of the samples: sums of floats depend on it, and equal runs have equal files.
    table = draws.group_by("number", maintain_order=True).agg(
        times=pl.len().cast(pl.Int32),
        mean_loss=pl.col("loss").mean(),
        relative_loss=pl.col("relative").mean(),
        squares=((pl.col("relative") - pl.col("relative").mean()) ** 2).sum(),
    )
    trained = inputs.trained.table
    table = table.with_columns(
        sample_id=trained["variant_id"].gather(table["number"]),
        caption=trained["captions"].gather(table["number"]).list.first(),
        deviation=_deviations(table),
    )
    return table.select(*COLUMNS).sort(["deviation", "sample_id"], descending=[True, False])


def _deviations(table: pl.DataFrame) -> pl.Series:
    """Return the distance of each `relative_loss` from their mean, in standard deviations.

    A mean of n draws varies by sigma^2 / n around its image's own value, and these values vary by tau^2 from
    image to image. tau^2 is what the variance of the means exceeds the mean of sigma^2 / n by (method of
    moments; DerSimonian and Laird, Meta-analysis in clinical trials, 1986, without weights).
    """
    means, times = table["relative_loss"].to_numpy(), table["times"].to_numpy()
    degrees = max(1, int(times.sum()) - len(times))
    of_draws = float(table["squares"].sum()) / degrees / times
    of_images = max(0.0, float(np.var(means, ddof=1)) - float(of_draws.mean())) if len(means) > 1 else 0.0

    # Equal losses have no spread, and their deviation is 0 at any divisor.
    spread = np.sqrt(of_images + of_draws)
    return pl.Series((means - means.mean()) / np.where(spread > 0, spread, 1.0))


def loss_trend(layout: RunLayout, num_steps: int) -> dict[str, float] | None:
    """Compare the relative losses at the end of a run with those at its start.

    Returns:
        `first` and `last`, the means of the first and last fifth of the relative losses, and `error`, the
        standard error of their difference; None if no loss was recorded.
    """
    relative = _draws(layout, num_steps)["relative"].to_numpy()
    if not len(relative):
        return None
    fifth = max(1, len(relative) // 5)
    first, last = relative[:fifth], relative[-fifth:]
    error = float(np.sqrt((np.var(first) + np.var(last)) / fifth))
    return {"first": float(np.mean(first)), "last": float(np.mean(last)), "error": error}


def share_below_half(layout: RunLayout, num_steps: int, *, num_timesteps: int) -> float | None:
    """Return the share of the run's draws with a noise level below 0.5; None if no loss was recorded.

    `num_timesteps` is the timestep at which a latent is all noise.
    """
    timesteps = [at for line in read_metrics(layout.sample_losses, num_steps) for at in line["timesteps"]]
    if not timesteps:
        return None
    return sum(at < num_timesteps / 2 for at in timesteps) / len(timesteps)


def _draws(layout: RunLayout, num_steps: int) -> pl.DataFrame:
    """Return one row per draw: `number` of the input, `loss`, and loss `relative` to the expected one."""
    numbers: list[int] = []
    timesteps: list[float] = []
    losses: list[float] = []
    for line in read_metrics(layout.sample_losses, num_steps):
        numbers += line["samples"]
        timesteps += line["timesteps"]
        losses += line["losses"]

    # A loss depends on the noise level far more than on the image, so each is divided by the mean loss of all
    # samples at similar timesteps.
    values = np.asarray(losses, dtype=np.float64)
    relative = values / _expected_losses(np.asarray(timesteps), values) if losses else values
    schema = {"number": pl.Int64, "loss": pl.Float64, "relative": pl.Float64}
    return pl.DataFrame({"number": numbers, "loss": values, "relative": relative}, schema=schema)


def _expected_losses(
    timesteps: npt.NDArray[np.float64], losses: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return for each draw the mean loss of its bin of similar timesteps."""
    num_bins = int(np.clip(len(losses) // MIN_DRAWS_PER_BIN, 1, MAX_BINS))
    # Two sorts give the rank of each draw; equal ranges of ranks are bins of equal size at any density.
    ranks = np.argsort(np.argsort(timesteps, kind="stable"), kind="stable")
    bins = ranks * num_bins // len(losses)
    sums = np.bincount(bins, weights=losses, minlength=num_bins)
    means = sums / np.bincount(bins, minlength=num_bins)

    # A bin of zero losses must not divide by zero.
    return np.maximum(means[bins], np.finfo(np.float64).tiny)
