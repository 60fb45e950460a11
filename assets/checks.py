"""The answers of an asset's checks.

A gate is a blocking check with severity ERROR: its step fails, and nothing downstream runs. The pipeline's
`checks.<asset>.run` decides; here its findings become Dagster's results.
"""

from collections.abc import Collection, Iterator
from importlib import import_module
from typing import TYPE_CHECKING

from dagster import (
    AssetCheckResult,
    AssetCheckSeverity,
    AssetKey,
    MetadataValue,
)

from assets.naming import asset_key
from assets.publishing import report_metadata, table_metadata
from pipeline.recipe import Recipe

if TYPE_CHECKING:
    from pipeline.checks.findings import Finding


def answers(recipe: Recipe, asset: str, asked: Collection[str]) -> Iterator[AssetCheckResult]:
    """What each of the checks `asked` of the asset's table says.

    Raises:
        GateClosedError: One or more of them close, once all have answered.
    """
    from pipeline.checks.findings import CheckContext, closed_gates_error, write_findings
    from pipeline.storage.tables import Tables

    key = asset_key(recipe, asset)
    run = import_module(f"pipeline.{asset}.checks").run
    findings = run(CheckContext(recipe, Tables(recipe.output_dir)))
    write_findings(recipe.output_dir, asset, findings)
    chosen = [finding for finding in findings if finding.name in asked]
    yield from (_result(key, finding) for finding in chosen)
    closed = [finding for finding in chosen if finding.closes]
    if closed:  # Dagster itself would only count them
        raise closed_gates_error({key.to_user_string(): closed})


def _result(key: AssetKey, finding: "Finding") -> AssetCheckResult:
    where = {"rows": table_metadata(finding.rows)} if finding.rows else {}
    fix = {"fix": MetadataValue.text(finding.fix)} if finding.fix else {}
    text = finding.summary if finding.passed else f"{finding.summary}\n\nfix: {finding.fix}"
    return AssetCheckResult(
        asset_key=key,
        check_name=finding.name,
        passed=finding.passed,
        severity=AssetCheckSeverity.ERROR if finding.severity == "error" else AssetCheckSeverity.WARN,
        description=text,
        metadata={**report_metadata(finding.numbers), **where, **fix},
    )
