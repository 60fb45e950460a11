"""Which gates would close in the next cache job, from what its stages would find; nothing is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import polars as pl

from pipeline.aspect_buckets import checks as aspect_buckets
from pipeline.checks.findings import CheckContext
from pipeline.errors import PathIsolationError
from pipeline.raw_images import checks as raw_images
from pipeline.recipe.gates import PATH_ISOLATION
from pipeline.recipe.isolation import require_isolation
from pipeline.storage.tables import Tables
from pipeline.validated_dataset import checks as validated_dataset

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.checks.findings import Finding
    from pipeline.recipe import Recipe
    from pipeline.reporting.reports import StageResult

_CHECKS = {
    "raw_images": raw_images.run,
    "validated_dataset": validated_dataset.run,
    "aspect_buckets": aspect_buckets.run,
}
"""In the order of the job."""


class ClosedGate(NamedTuple):
    """A gate that would close.

    Attributes:
        asset: Whose gate it is.
        name: The gate's.
        summary: What is wrong, with the numbers met.
        fix: What the user can do.
    """

    asset: str
    name: str
    summary: str
    fix: str


def closed_gates(recipe: Recipe, results: Mapping[str, StageResult]) -> list[ClosedGate]:
    """The gates at which the job would stop: those of the first asset that has closed ones.

    Args:
        recipe: Of the job.
        results: Of raw_images, validated_dataset and aspect_buckets.
    """
    reports = {asset: result.report for asset, result in results.items()}
    context = CheckContext(recipe, _Foreseen(recipe.output_dir, results), reports)
    for asset, run in _CHECKS.items():
        closed = [finding for finding in run(context) if finding.closes]
        if closed:
            return [_closed(asset, finding) for finding in closed]
    return []


def path_gate(recipe: Recipe) -> ClosedGate | None:
    """The gate `path_isolation`, where the job would stop at it before any work; None otherwise."""
    try:
        require_isolation(recipe)
    except PathIsolationError as err:
        places = ", ".join(err.where.splitlines())
        return ClosedGate("raw_images", PATH_ISOLATION.name, f"{err.what} ({places})", err.fix)
    return None


def _closed(asset: str, finding: Finding) -> ClosedGate:
    return ClosedGate(asset, finding.name, finding.summary, finding.fix)


class _Foreseen(Tables):
    """The tables as the job would write them."""

    def __init__(self, output_dir: Path, results: Mapping[str, StageResult]) -> None:
        super().__init__(output_dir)
        self._results = results

    def read(self, asset: str, columns: Iterable[str] | None = None) -> pl.DataFrame:
        table = self._results[asset].table
        return table if columns is None else table.select(columns)

    def read_rejected(self, stage: str | None = None) -> pl.DataFrame:
        wanted = self._results if stage is None else [stage]
        return pl.concat([self._results[each].rejected for each in wanted])
