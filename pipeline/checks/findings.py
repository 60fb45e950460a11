"""What the checks share: their context, their findings, gates opened by name, and robust outlier statistics.

A check file is one function, `run(context)`, which looks at the files of one asset and ends in `findings`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline.recipe.gates import SPECS, CheckSpec
from pipeline.reporting.reports import Report, read_report

if TYPE_CHECKING:
    from pipeline.recipe import Recipe
    from pipeline.storage.tables import Tables

Severity = Literal["error", "warn"]

MAX_ROWS = 50
"""Of a finding; `numbers["num_rows"]` tells how many there were."""

OUTLIER_THRESHOLD = 5.0
"""In robust standard deviations of the logarithm. One value in 1.7 million of a log-normal population is as
far from the median; 3.5, the usual choice, would name one sound photograph in 2,000."""

OUTLIER_MIN_SPREAD = 0.1
"""Least standard deviation of the logarithm: 10%. Without it half of the values being equal would make every
other value an outlier; with it, one must be more than exp(5 * 0.1) = 1.65 times off."""

OUTLIER_MIN_VALUES = 8
"""Of fewer values none is called an outlier: their spread says too little."""

_NORMAL_MAD = 0.6744897501960817
"""Median absolute deviation of the standard normal distribution."""


@dataclass(frozen=True)
class CheckContext:
    """What a check may look at. It reads the files itself, so each check can run alone.

    Attributes:
        recipe: The recipe whose asset is checked.
        tables: Its tables.
        reports: By asset, those that count in place of the files.
        sources: Whether the datasets may be looked at; without, a check of their files passes unasked.
    """

    recipe: Recipe
    tables: Tables
    reports: Mapping[str, Report] = field(default_factory=dict[str, Report])
    sources: bool = True

    def report(self, asset: str) -> Report | None:
        """The asset's report of its last materialization; None when there is none or it is damaged."""
        return self.reports.get(asset) or read_report(self.recipe.output_dir, asset)


@dataclass(frozen=True)
class Outcome:
    """What one check saw, before the recipe has said which gates are open.

    Attributes:
        passed: True where there is nothing to object to.
        summary: One sentence with the numbers met.
        fix: What the user can do, most useful first; empty when passed.
        rows: The samples, buckets or files that are meant, one flat mapping each, worst first.
        numbers: Figures for machines and graphs.
        final: True where nobody could want to go on: `checks.allow` does not open the gate then.
    """

    passed: bool
    summary: str
    fix: str = ""
    rows: Sequence[Mapping[str, Any]] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict[str, Any])
    final: bool = False


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: The check's, as in `names.SPECS`.
        passed: True where there is nothing to object to.
        severity: Of a failure: "error" closes the gate, "warn" does not.
        summary: One sentence with the numbers met.
        fix: What the user can do; empty when passed.
        rows: At most `MAX_ROWS` of what is meant.
        numbers: Figures for machines, JSON-serialisable, `num_rows` among them.
    """

    name: str
    passed: bool
    severity: Severity
    summary: str
    fix: str
    rows: list[dict[str, Any]]
    numbers: dict[str, Any]

    @property
    def closes(self) -> bool:
        """True where nothing downstream may run."""
        return not self.passed and self.severity == "error"


def findings(context: CheckContext, asset: str, outcomes: Mapping[str, Outcome]) -> list[Finding]:
    """One finding for each check of `asset`, in the order of `names.SPECS`.

    A failed gate that `checks.allow` names becomes a warning which says so. `<recipe>` in a fix becomes the
    recipe's name.
    """
    specs = SPECS[asset]
    assert set(outcomes) == {spec.name for spec in specs}, f"{asset}: {sorted(outcomes)}"
    allowed = context.recipe.checks.allow
    found = [_finding(spec, outcomes[spec.name], spec.name in allowed) for spec in specs]
    return [replace(each, fix=each.fix.replace("<recipe>", context.recipe.name)) for each in found]


def _finding(spec: CheckSpec, outcome: Outcome, allowed: bool) -> Finding:
    summary, fix = outcome.summary, outcome.fix
    openable = spec.openable and not outcome.final
    allowed = allowed and openable
    if spec.gate and openable and not outcome.passed:
        note = f"checks.allow names {spec.name}"
        summary = f"{summary} (a warning only, because {note})" if allowed else summary
        fix = fix if allowed else f"{fix}; or open this gate knowingly with checks.allow: [{spec.name}]"
    return Finding(
        name=spec.name,
        passed=outcome.passed,
        severity="error" if spec.gate and not allowed else "warn",
        summary=summary,
        fix=fix,
        rows=[dict(row) for row in outcome.rows[:MAX_ROWS]],
        numbers={"num_rows": len(outcome.rows), **outcome.numbers},
    )


@dataclass(frozen=True)
class Outliers:
    """Which of N positive values are far from the rest.

    Attributes:
        mask: Boolean array (N,), True for an outlier.
        median: Of the values; NaN when there are none.
        low: Values below are outliers.
        high: Values above are outliers.
        judged: False where there were too few values to say anything; then `mask` is all False.
    """

    mask: npt.NDArray[np.bool_]
    median: float
    low: float
    high: float
    judged: bool


def outliers(values: npt.ArrayLike) -> Outliers:
    """The values whose logarithm is more than `OUTLIER_THRESHOLD` robust deviations from the median's.

    The deviation is MAD / 0.6745 (Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993), at least
    `OUTLIER_MIN_SPREAD`, so up to half of the values may be wrong without hiding one another. Fewer than
    `OUTLIER_MIN_VALUES` values are not judged. The order of the values does not matter.

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
