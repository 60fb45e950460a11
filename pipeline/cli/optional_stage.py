"""Running an optional stage from its command, as its asset does."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from pipeline.cli.conventions import echo, log_to_stderr
from pipeline.cli.json_output import give
from pipeline.recipe import Recipe

if TYPE_CHECKING:
    from pipeline.processes.launch import Launch, LocalLaunch
    from pipeline.reporting.findings import CheckContext, Finding
    from pipeline.reporting.reports import Report, StageResult
    from pipeline.storage.tables import Tables


def local_launch(recipe: Recipe) -> LocalLaunch:
    """Return the launch of a command; the lines of its processes are on standard error."""
    from pipeline.processes.launch import LocalLaunch
    from pipeline.reporting.terminal import TERMINAL_VARIABLE

    # On a terminal, the launched process draws a bar, and its lines would disturb it.
    return LocalLaunch(recipe.accelerate, None if TERMINAL_VARIABLE in os.environ else log_to_stderr)


def run_stage(
    recipe: Recipe,
    asset: str,
    stage: Callable[[Tables, Launch], StageResult],
    run_checks: Callable[[CheckContext], Sequence[Finding]],
    *,
    aside: str | None = None,
) -> Report:
    """Run a stage, write its table, report and checks, and print the checks that fail.

    With `aside`, table and report are written to this folder of `reports/`, and those of the recipe's own
    asset stay as they are.
    """
    from pipeline.outputs.folder import outputs_of
    from pipeline.outputs.stage_files import stage_files, table_file
    from pipeline.reporting.findings import CheckContext, write_findings
    from pipeline.reporting.reports import report_path, write_report
    from pipeline.storage.atomic import write_atomically
    from pipeline.storage.tables import Tables, write_rows

    launch = local_launch(recipe)
    outputs, tables = outputs_of(recipe, log_to_stderr), Tables(recipe.output_dir, log=log_to_stderr)
    with stage_files(outputs, asset, checks_only=False, log=log_to_stderr):
        result = stage(tables, launch)
        report = {**result.report, "recipe": recipe.name}
        findings = run_checks(CheckContext(recipe, tables, {asset: report}, log=log_to_stderr))
        if aside is None:
            tables.write(asset, result.table)
            outputs.upload(table_file(asset))
            tables.write_rejected(asset, result.rejected)
            write_report(recipe.output_dir, asset, report)
            write_findings(recipe.output_dir, asset, findings)
        else:
            table = report_path(recipe.output_dir, f"{aside}/{asset}").with_suffix(".parquet")
            write_atomically(table, partial(write_rows, result.table))
            write_report(recipe.output_dir, f"{aside}/{asset}", report)
            outputs.replace_folder(f"reports/{aside}/")
    for finding in findings:
        if not finding.passed:
            echo(f"warning: {finding.name}: {finding.summary}; {finding.fix}", err=True)
    give(report)
    return report
