"""Checks of evaluation: the concept was learned, the base model kept, nothing memorised, a step chosen."""

from __future__ import annotations

from typing import Any

from pipeline.errors import counted
from pipeline.evaluation.choice import breaks_limit
from pipeline.reporting.findings import CheckContext, Finding, Outcome, findings

STAGE = "evaluation"

_AGAIN = "run the evaluation again: latentline evaluate <recipe>"


def run(context: CheckContext) -> list[Finding]:
    """Return the findings of all checks, from the report of the last evaluation."""
    report = context.report(STAGE)
    if report is None:
        unreadable = Outcome(False, "the report of the evaluation is missing or damaged", _AGAIN)
        names = ("concept_learned", "base_kept", "not_memorised", "choice_decided")
        return findings(context, STAGE, dict.fromkeys(names, unreadable))

    # Of the chosen step, or of the last one, which is published.
    chosen = report["chosen_step"]
    steps: list[dict[str, Any]] = report["steps"]
    step = next((each for each in steps if each["step"] == chosen), steps[-1] if steps else None)
    return findings(
        context,
        STAGE,
        {
            "concept_learned": _concept_learned(report, step),
            "base_kept": _below_limit(report, step, "drift", "lower the learning rate, or train fewer steps"),
            "not_memorised": _below_limit(
                report, step, "copies", "train fewer steps or with a lower rank, or add more images"
            ),
            "choice_decided": _choice_decided(report),
        },
    )


def _concept_learned(report: dict[str, Any], step: dict[str, Any] | None) -> Outcome:
    number = None if step is None else step["learned"]
    if step is None or number is None:
        return _absent(report, "learned")
    shown = f"step {step['step']:,} is closer to held-out images than the base model by {_text(number)}"
    low = number["low"]
    if low is not None and low > 0:
        return Outcome(True, shown, numbers=_numbers(step, number))
    fix = "train longer or with a higher learning rate; raise evaluation.pictures if the interval is wide"
    return Outcome(False, f"{shown}, which may be chance", fix, numbers=_numbers(step, number))


def _below_limit(report: dict[str, Any], step: dict[str, Any] | None, name: str, fix: str) -> Outcome:
    number = None if step is None else step[name]
    if step is None or number is None:
        return _absent(report, name)
    limit = report["limits"][name]
    shown = f"{name} of step {step['step']:,} is {_text(number)}, and its limit is {limit:g}"
    numbers = {**_numbers(step, number), "limit": limit}
    if breaks_limit(name, number["mean"], number["low"], limit):
        return Outcome(False, shown, fix, numbers=numbers)
    if number["mean"] > limit:
        shown += "; these pictures cannot tell whether it is above, raise evaluation.pictures to find out"
    return Outcome(True, shown, numbers=numbers)


def _absent(report: dict[str, Any], name: str) -> Outcome:
    # Not a failure: a number needs a holdout or a scorer of texts, and the recipe decides about both.
    return Outcome(True, f"not measured: {report['absent'].get(name, 'no picture has this number')}")


def _choice_decided(report: dict[str, Any]) -> Outcome:
    num_steps = counted(len({each["step"] for each in report["steps"]}), "step")
    if report["decided"]:
        return Outcome(True, report["why"], numbers={"chosen_step": report["chosen_step"]})
    fix = "raise evaluation.pictures, set datasets[].validation_fraction, or save more steps"
    return Outcome(False, f"{report['why']} ({num_steps})", fix)


def _text(number: dict[str, Any]) -> str:
    if number["low"] is None:
        return f"{number['mean']:.3f} (a single picture)"
    return f"{number['mean']:.3f} ({number['low']:.3f} to {number['high']:.3f})"


def _numbers(step: dict[str, Any], number: dict[str, Any]) -> dict[str, Any]:
    return {"step": step["step"], **{name: number[name] for name in ("mean", "low", "high")}}
