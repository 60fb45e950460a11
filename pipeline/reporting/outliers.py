"""Robust outlier detection for positive quantities such as file sizes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

OUTLIER_THRESHOLD = 5.0
"""Distance of an outlier from the median, in robust standard deviations of the logarithm.

In a log-normal population one value in 1.7 million is that far from the median. The usual threshold of 3.5
would flag one sound photograph in 2,000.
"""

OUTLIER_MIN_SPREAD = 0.1
"""Lower bound of the standard deviation of the logarithm (10%).

Without a bound, half of the values being equal would make every other value an outlier. With it, a value
must differ from the median by a factor of at least exp(5 * 0.1) = 1.65.
"""

OUTLIER_MIN_VALUES = 8
"""Minimum number of values; the spread of fewer values is too uncertain."""

_NORMAL_MAD = 0.6744897501960817
"""Median absolute deviation of the standard normal distribution."""


@dataclass(frozen=True)
class Outliers:
    """Outliers among N positive values.

    Attributes:
        mask: Boolean array (N,), True for an outlier.
        median: Median of the values; NaN if there are none.
        low: Values below are outliers.
        high: Values above are outliers.
        judged: False if there were too few values; `mask` is then all False.
    """

    mask: npt.NDArray[np.bool_]
    median: float
    low: float
    high: float
    judged: bool


def outliers(values: npt.ArrayLike) -> Outliers:
    """Return the values with a logarithm more than `OUTLIER_THRESHOLD` robust deviations from the median.

    The deviation is MAD / 0.6745 (Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993), at least
    `OUTLIER_MIN_SPREAD`, so up to half of the values may be wrong without hiding one another. The order of
    the values does not matter.

    Args:
        values: Positive numbers (N,).

    Raises:
        ValueError: A value is not positive or not finite.
    """
    array = np.asarray(values, dtype=np.float64)
    if not (np.isfinite(array) & (array > 0)).all():
        raise ValueError("outliers are defined for positive, finite values only")
    if array.size < OUTLIER_MIN_VALUES:
        median = float(np.median(array)) if array.size else float("nan")
        return Outliers(np.zeros(array.shape, dtype=np.bool_), median, 0.0, float("inf"), judged=False)

    logs = np.log(array)
    centre = float(np.median(logs))
    spread = max(float(np.median(np.abs(logs - centre))) / _NORMAL_MAD, OUTLIER_MIN_SPREAD)

    mask = np.abs(logs - centre) > OUTLIER_THRESHOLD * spread
    low, high = np.exp([centre - OUTLIER_THRESHOLD * spread, centre + OUTLIER_THRESHOLD * spread])
    return Outliers(mask, float(np.median(array)), float(low), float(high), judged=True)
