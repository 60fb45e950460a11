"""Means over prompts and seeds with 95% intervals.

A prompt is drawn with several seeds, and a seed gives all prompts the same noise, so pictures of one prompt
resemble each other, and so do pictures of one seed. The interval covers new prompts and new seeds. The
variance of the mean is the variance of the prompts' means plus the variance of the seeds' means, as with
two-way clusters (Cameron, Gelbach and Miller, Robust Inference With Multiway Clustering, 2011; here nothing
is subtracted, because that can be negative with few prompts). Satterthwaite's degrees of freedom (1946) give
the quantile of Student's t. docs/evaluation.md has the simulated coverage, and that of the bootstrap, which
is too low with few prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

if TYPE_CHECKING:
    import numpy.typing as npt

PROMPT = ("role", "concept", "prompt")
"""Columns that identify a prompt."""

CELL = (*PROMPT, "seed")
"""Columns that identify a picture of a step, and its pair in every other step."""

_COVERAGE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean over prompts and seeds, with its 95% interval.

    Attributes:
        low: Lower end; None if a single picture gives no interval.
        high: Upper end; None if a single picture gives no interval.
        cells: Number of pictures.
    """

    mean: float
    low: float | None
    high: float | None
    cells: int

    def __str__(self) -> str:
        """Return the numbers as in "0.41 (0.36 to 0.46)"."""
        ends = "" if self.low is None else f" ({self.low:.2f} to {self.high:.2f})"
        return f"{self.mean:.2f}{ends}"

    def as_json(self) -> dict[str, Any]:
        """Return the values for a report."""
        return {"mean": self.mean, "low": self.low, "high": self.high, "pictures": self.cells}


def interval(scores: pl.DataFrame) -> Interval:
    """Return the mean of the column `score`, with one row per prompt and seed (`CELL`).

    The mean gives each prompt the same weight.
    """
    grid = scores.pivot("seed", index=PROMPT, values="score").drop(PROMPT)
    return grid_interval(grid.cast(pl.Float64).fill_null(float("nan")).to_numpy())


def grid_interval(grid: npt.NDArray[np.float64]) -> Interval:
    """Return the mean of a grid with one row per prompt and one column per seed; NaN marks a missing cell."""
    num_cells = int(np.count_nonzero(~np.isnan(grid)))
    by_prompt = np.nanmean(grid, axis=1)
    mean = float(by_prompt.mean())

    # Prompts with seeds of their own share no noise, and only prompts are independent then.
    if np.isnan(grid).any() and len(by_prompt) > 1:
        variance, degrees = _of_independent(by_prompt)
    elif min(grid.shape) == 1:
        variance, degrees = _of_independent(grid[~np.isnan(grid)])
    else:
        variance, degrees = _of_crossed(grid)
    if degrees == 0:
        return Interval(mean, None, None, num_cells)

    half = _quantile(degrees) * float(np.sqrt(variance))
    return Interval(mean, mean - half, mean + half, num_cells)


def _of_independent(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return the variance of the mean and its degrees of freedom, which are 0 for a single value."""
    number = len(values)
    return (float(values.var(ddof=1)) / number, number - 1.0) if number > 1 else (0.0, 0.0)


def _of_crossed(grid: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return the variance of a complete grid's mean, and its degrees of freedom."""
    by_prompt, prompt_degrees = _of_independent(grid.mean(axis=1))
    by_seed, seed_degrees = _of_independent(grid.mean(axis=0))
    total = by_prompt + by_seed
    if total == 0.0:
        return 0.0, prompt_degrees
    return total, total**2 / (by_prompt**2 / prompt_degrees + by_seed**2 / seed_degrees)


def _quantile(degrees: float) -> float:
    # Imported here, because reports and plans read intervals without computing one.
    from scipy.special import stdtrit

    return float(stdtrit(degrees, (1 + _COVERAGE) / 2))
