"""An asset's checks: their declarations, and the findings of `pipeline/<asset>/checks.py` as results."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from dagster import (
    AssetCheckResult,
    AssetCheckSeverity,
    AssetCheckSpec,
    AssetExecutionContext,
    AssetKey,
    MetadataValue,
)

from assets.metadata import report_metadata, table_metadata
from assets.names import asset_key
from pipeline.errors import PathIsolationError
from pipeline.escaping import markdown_lines, printable_lines
from pipeline.recipe import Recipe
from pipeline.recipe.check_specs import ONLY_WITH, PATH_ISOLATION, CheckSpec, specs_of
from resources.step_log import run_log

if TYPE_CHECKING:
    from pipeline.reporting.findings import CheckContext, Finding

GATE = "gate"
"""Key of a check's definition metadata: whether its failure stops all later assets."""


def check_specs(recipe: Recipe, asset: str) -> list[AssetCheckSpec]:
    """Declare every check of `asset` that can fail in this recipe.

    Others would always show "Succeeded", and each adds about 14 kB to the event log in every run.
    """
    key, present = asset_key(recipe, asset), features(recipe)
    return [
        _declaration(recipe, key, spec)
        for spec in specs_of(asset)
        if ONLY_WITH.get(spec.name) in (None, *present)
    ]


def _declaration(recipe: Recipe, key: AssetKey, spec: CheckSpec) -> AssetCheckSpec:
    is_gate = spec.gate or spec.name in recipe.checks.gates
    # The UI sorts checks by their names, and shows no other difference between gates and warnings.
    kind = "Gate" if is_gate else "Warning"
    if spec.name in recipe.checks.allow:
        kind = "Gate that checks.allow opens"
    return AssetCheckSpec(
        spec.name,
        asset=key,
        description=f"{kind}: {spec.explained}",
        blocking=is_gate,
        metadata={GATE: is_gate},
    )


def features(recipe: Recipe) -> set[str]:
    """Return the features of a recipe on which checks depend, by the names in `ONLY_WITH`."""
    datasets = recipe.datasets
    present = {
        "masks": any(each.mask is not None for each in datasets),
        "references": any(each.references for each in datasets),
        "holdout": any(each.validation_fraction > 0 for each in datasets),
        "sliders": any(each.slider is not None for each in datasets),
        "subjects": any(each.mask is not None or each.focus_columns is not None for each in datasets),
    }
    return {name for name, is_present in present.items() if is_present}


def path_isolation_results(
    context: AssetExecutionContext, error: PathIsolationError | None
) -> Iterator[AssetCheckResult]:
    """Yield the result of `path_isolation` if the check is selected."""
    if PATH_ISOLATION.name in _selected_checks(context):
        yield _path_isolation_result(error)


def check_results(
    context: AssetExecutionContext,
    recipe: Recipe,
    asset: str,
    run: Callable[["CheckContext"], Sequence["Finding"]],
) -> Iterator[AssetCheckResult]:
    """Yield the result of each selected check of the asset's table, except `path_isolation`.

    Raises:
        GateClosedError: At least one gate closed. It is raised after all results, and names all closed gates.
    """
    from pipeline.reporting.findings import REJECTED_PAGE, CheckContext, closed_gates_error, write_findings
    from pipeline.storage.tables import Tables

    selected = _selected_checks(context) - {PATH_ISOLATION.name}
    if not selected:
        return

    # All checks run, so that the report lists all of them, but only the selected ones have a result.
    inputs = CheckContext(recipe, Tables(recipe.output_dir), log=run_log(context))
    findings = run(inputs)
    write_findings(recipe.output_dir, asset, findings)
    selected_findings = [finding for finding in findings if finding.name in selected]
    for finding in selected_findings:
        yield _check_result(finding)

    # Dagster would fail the step as well, but its message gives only the number of failed checks.
    closed = [finding for finding in selected_findings if finding.closes]
    if closed:
        page = recipe.output_dir / REJECTED_PAGE if asset == "validated_dataset" else None
        key = next(iter(context.selected_asset_check_keys)).asset_key
        raise closed_gates_error({key.to_user_string(): closed}, page=page)


def _selected_checks(context: AssetExecutionContext) -> set[str]:
    return {check.name for check in context.selected_asset_check_keys}


# Each step of a run calls this, and the test walks the datasets for symlinks: one walk per run is enough.
@lru_cache(maxsize=8)
def path_conflict(run_id: str, recipe: Recipe) -> PathIsolationError | None:
    """Return why the paths of the recipe are not isolated; None if they are."""
    del run_id
    from pipeline.recipe.isolation import require_isolation

    try:
        require_isolation(recipe)
    except PathIsolationError as err:
        return err
    return None


def _path_isolation_result(error: PathIsolationError | None) -> AssetCheckResult:
    if error is None:
        return AssetCheckResult(
            passed=True, check_name=PATH_ISOLATION.name, description="No two paths overlap."
        )
    return AssetCheckResult(
        passed=False,
        check_name=PATH_ISOLATION.name,
        severity=AssetCheckSeverity.ERROR,
        description=markdown_lines(str(error)),
        metadata={"what": error.what, "where": error.where, "fix": error.fix},
    )


def _check_result(finding: "Finding") -> AssetCheckResult:
    rows = {"rows": table_metadata(finding.rows)} if finding.rows else {}
    # The description has the text too, and the event log stores each entry three times.
    texts = {} if finding.passed else {"summary": finding.summary, "fix": finding.fix}
    shown = {name: MetadataValue.text(printable_lines(text)) for name, text in texts.items() if text}
    description = finding.summary if finding.passed else f"{finding.summary}\n\nfix: {finding.fix}"

    # The UI shows descriptions as Markdown. The texts are for people who copy names, and for the run summary.
    return AssetCheckResult(
        check_name=finding.name,
        passed=finding.passed,
        severity=AssetCheckSeverity.ERROR if finding.severity == "error" else AssetCheckSeverity.WARN,
        description=markdown_lines(description),
        metadata={**report_metadata(finding.numbers), **rows, **shown},
    )
