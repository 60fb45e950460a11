"""Checks of sweep: no variant failed, and the scores show the best one."""

from __future__ import annotations

from pipeline.errors import counted
from pipeline.reporting.findings import CheckContext, Finding, Outcome, findings

STAGE = "sweep"

_AGAIN = "run the sweep again: latentline sweep <recipe>"


def run(context: CheckContext) -> list[Finding]:
    """Return the findings of all checks, from the report of the last sweep."""
    report = context.report(STAGE)
    if report is None:
        unreadable = Outcome(False, "the report of the sweep is missing or damaged", _AGAIN)
        names = ("variants_finished", "sweep_decided")
        return findings(context, STAGE, dict.fromkeys(names, unreadable))

    failed = [row for row in report["variants"] if row["error"] is not None]
    variants = counted(len(report["variants"]), "variant")
    finished = Outcome(
        not failed,
        f"{len(failed):,} of {variants} failed" if failed else f"none of {variants} failed",
        "read the errors in tables/sweep.parquet; remove these values from the sweep, or correct the cause"
        if failed
        else "",
        rows=[{name: row[name] for name in ("variant", "settings", "error")} for row in failed],
        numbers={"failed": len(failed)},
    )
    decided = Outcome(
        report["decided"],
        report["why"],
        ""
        if report["decided"]
        else "raise evaluation.pictures, datasets[].validation_fraction or sweep.seeds",
        numbers={} if report["winner"] is None else {"winner": report["winner"]},
    )
    return findings(context, STAGE, {"variants_finished": finished, "sweep_decided": decided})
