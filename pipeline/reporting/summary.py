"""Summary of a run: a few lines on images, cache, gates and training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import RUN_RECIPE, counted
from pipeline.reporting.reports import Report

REJECTING_STAGES = ("raw_images", "validated_dataset", "aspect_buckets", "vae_latents")
"""Stages that may reject a sample, in order."""

MAX_REASONS = 4
"""Maximum number of rejection reasons shown."""

MAX_WARNINGS = 8
"""Maximum number of warnings shown."""


@dataclass(frozen=True)
class CheckResult:
    """Result of one check in the run.

    Attributes:
        gate: True if a failure blocks the assets downstream, unless the recipe allows it.
        closes: True if the check blocked them in this run.
        text: First line of its message.
    """

    asset: str
    name: str
    passed: bool
    gate: bool
    closes: bool
    text: str


@dataclass(frozen=True)
class RunResult:
    """Result of one run for one recipe.

    Attributes:
        reports: Report of each asset that the run materialized, by asset name.
        checks: Results of all checks, in the order in which they ran.
    """

    recipe: str
    output_dir: Path
    reports: Mapping[str, Report]
    checks: Sequence[CheckResult]


def run_summary(run: RunResult) -> str:
    """Return one `name  text` line per fact; steps that the run did not execute have none."""
    lines = [
        *_image_lines(run.reports),
        *_cache_lines(run.reports),
        *_diagnosis_lines(run.reports),
        *_check_lines(run.checks),
        *_training_lines(run),
        *_evaluation_lines(run.reports),
        *_sweep_lines(run.reports),
        *_page_lines(run),
        *_next_lines(run),
    ]
    width = max((len(name) for name, _ in lines), default=0)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in lines)


def _image_lines(reports: Mapping[str, Report]) -> list[tuple[str, str]]:
    stages = [reports[name] for name in REJECTING_STAGES if name in reports]
    if not stages:
        return []

    counts: Counter[str] = Counter()
    for report in stages:
        counts.update(report.get("rejected_by_reason", {}))
    reasons = ", ".join(f"{name} {count:,}" for name, count in counts.most_common(MAX_REASONS))
    rejected = sum(int(report.get("rejected", 0)) for report in stages)

    # A run may execute some of the stages only, so the counts are about the stages that it executed.
    text = f"{int(stages[0].get('in', 0)):,} found, {rejected:,} rejected"
    text += f" ({reasons})" if reasons else ""
    lines = [("images", f"{text}, {int(stages[-1].get('kept', 0)):,} kept")]
    if "aspect_buckets" in reports:
        lines.append(("buckets", f"{int(reports['aspect_buckets']['num_buckets']):,}"))
    return lines


def _cache_lines(reports: Mapping[str, Report]) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for asset, name in (("vae_latents", "latents"), ("text_embeddings", "captions")):
        if asset in reports:
            report = reports[asset]
            text = f"{int(report['encoded']):,} encoded, {int(report['reused']):,} reused"
            text += f", {int(report['failed']):,} failed" if report.get("failed") else ""
            lines.append((name, text))
    return lines


def _check_lines(checks: Sequence[CheckResult]) -> list[tuple[str, str]]:
    if not checks:
        return []
    num_passed = sum(check.passed for check in checks if check.gate)
    num_closed = sum(check.closes for check in checks)
    warnings = [check for check in checks if not check.passed and not check.closes]

    text = f"{num_passed:,} passed" + (f", {num_closed:,} closed" if num_closed else "")
    lines = [("gates", f"{text}, {counted(len(warnings), 'warning')}")]
    lines += [("warning", f"{check.asset}, {check.name}: {check.text}") for check in warnings[:MAX_WARNINGS]]
    if len(warnings) > MAX_WARNINGS:
        lines.append(("warning", f"and {len(warnings) - MAX_WARNINGS:,} more"))
    return lines


def _training_lines(run: RunResult) -> list[tuple[str, str]]:
    report = run.reports.get("trained_lora")
    if report is None:
        return []
    text = counted(int(report["steps"]), "step")
    losses = [report.get("first_loss"), report.get("last_loss")]
    if losses != [None, None]:
        first, last = ("not finite" if loss is None else f"{loss:.4f}" for loss in losses)
        text += f", loss {first} (first) to {last} (last)"
    if report.get("from_checkpoint"):
        text += "; from the checkpoint of this step, without training"
    elif not report["launched"]:
        text += "; already finished and unchanged"
    elif report.get("resumed_from"):
        text += f"; resumed from step {int(report['resumed_from']):,}"
    lines = [("training", text)]
    if report.get("difference"):
        lines.append(("new run", f"{report['run']}; {report['difference']}"))
    elif report.get("run"):
        lines.append(("run", report["run"]))
    return [*lines, ("LoRA", str(run.output_dir / "lora"))]


def _page_lines(run: RunResult) -> list[tuple[str, str]]:
    """Return the pages that the run wrote, which say more than the lines above."""
    pages = {
        "validated_dataset": ("dataset", "dataset/index.html"),
        "trained_lora": ("pictures", "trained_lora/samples.jpg"),
    }
    # The page of the recipe shows the results of all stages.
    paths = [("page", run.output_dir / "reports" / "index.html")] if run.reports else []
    paths += [
        (label, run.output_dir / "reports" / page)
        for asset, (label, page) in pages.items()
        if asset in run.reports
    ]
    return [(label, str(path)) for label, path in paths if path.is_file()]


def _next_lines(run: RunResult) -> list[tuple[str, str]]:
    """Return the commands that most people run next."""
    if any(check.closes for check in run.checks):
        return []
    report = run.reports.get("trained_lora")
    if report is None:
        is_cached = {"vae_latents", "text_embeddings"} <= run.reports.keys()
        return [("next", f"{RUN_RECIPE} {run.recipe}   trains the LoRA")] if is_cached else []
    evaluation = run.reports.get("evaluation") or {}
    export, effect = "--step N", "publishes the best step in lora/"
    if "published" in evaluation:
        effect = "publishes another step in lora/"
    elif evaluation.get("decided"):
        export, effect = "--best", f"publishes step {evaluation['chosen_step']:,} in lora/"
    return [
        ("next", f"latentline sample {run.recipe} --step all   draws pictures at each saved step"),
        ("", f"latentline export {run.recipe} {export}   {effect}"),
    ]


def _diagnosis_lines(reports: Mapping[str, Report]) -> list[tuple[str, str]]:
    report = reports.get("diagnosis")
    return [] if report is None else [("diagnosis", report["why"])]


def _sweep_lines(reports: Mapping[str, Report]) -> list[tuple[str, str]]:
    report = reports.get("sweep")
    return [] if report is None else [("sweep", report["why"])]


def _evaluation_lines(reports: Mapping[str, Report]) -> list[tuple[str, str]]:
    report = reports.get("evaluation")
    if report is None:
        return []
    drawn, reused = int(report["pictures_encoded"]), int(report["pictures_reused"])
    pictures = counted(drawn, "picture") + f" drawn, {reused:,} reused"
    lines = [("evaluation", f"{pictures}; {report['why']}")]
    return [*lines, ("published", report["published"])] if "published" in report else lines
