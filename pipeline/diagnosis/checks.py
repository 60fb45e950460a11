"""Checks of diagnosis: images fit their own captions better than other captions."""

from __future__ import annotations

from pipeline.reporting.findings import CheckContext, Finding, Outcome, findings

STAGE = "diagnosis"


def run(context: CheckContext) -> list[Finding]:
    """Return the findings of all checks, from the report of the last diagnosis."""
    return findings(context, STAGE, {"captions_match_images": _captions_match_images(context)})


def _captions_match_images(context: CheckContext) -> Outcome:
    report = context.report(STAGE)
    if report is None:
        again = "run the diagnosis again: latentline diagnose <recipe>"
        return Outcome(False, "the report of the diagnosis is missing or damaged", again)

    numbers = {name: report[name] for name in ("fits", "does_not_fit", "cannot_tell", "passes")}
    # Not a failure: the base model may not know what the dataset shows, or the captions may be alike.
    if not report["decided"] or not report["does_not_fit"]:
        return Outcome(True, report["why"], numbers=numbers)
    return Outcome(
        False,
        report["why"],
        "compare the images of reports/diagnosis/worst.jpg with their captions, and correct wrong captions, "
        "then run the job again",
        rows=report["worst"],
        numbers={**numbers, "num_rows": report["does_not_fit"]},
    )
