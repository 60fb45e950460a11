"""A run in a few lines, for people: what was found and kept, encoded, checked and trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import counted
from pipeline.reporting.reports import Report

FUNNEL = ("raw_images", "validated_dataset", "aspect_buckets", "vae_latents")
"""The stages that may reject a sample, in their order."""

MAX_REASONS = 4
MAX_WARNINGS = 8


@dataclass(frozen=True)
class CheckResult:
    """What one check said in the run.

    Attributes:
        asset: Whose check it is.
        name: Its name.
        passed: Whether it had nothing to object to.
        gate: True where its failure stops what comes after, unless the recipe has opened it.
        closes: True where it stopped what comes after.
        text: What it saw, its first line.
    """

    asset: str
    name: str
    passed: bool
    gate: bool
    closes: bool
    text: str


@dataclass(frozen=True)
class RunResult:
    """What one run did for one recipe.

    Attributes:
        recipe: Its name.
        output_dir: Its output folder.
        reports: The report of each asset that the run materialized, by name.
        checks: All that were run, in order.
    """

    recipe: str
    output_dir: Path
    reports: Mapping[str, Report]
    checks: Sequence[CheckResult]


def run_summary(seen: RunResult) -> str:
    """The run's numbers, a line each, `name  what`; nothing about what the run did not do."""
    lines = [*_funnel(seen.reports), *_cached(seen.reports), *_checked(seen.checks), *_trained(seen)]
    width = max((len(name) for name, _ in lines), default=0)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in lines)


def _funnel(reports: Mapping[str, Report]) -> list[tuple[str, str]]:
    stages = [reports[name] for name in FUNNEL if name in reports]
    if not stages:
        return []
    reasons: Counter[str] = Counter()
    for report in stages:
        reasons.update(report.get("rejected_by_reason", {}))
    rejected = sum(int(report.get("rejected", 0)) for report in stages)
    named = ", ".join(f"{name} {count:,}" for name, count in reasons.most_common(MAX_REASONS))
    numbers = f"{int(stages[0].get('in', 0)):,} found, {rejected:,} rejected"
    numbers += f" ({named})" if named else ""
    lines = [("images", f"{numbers}, {int(stages[-1].get('kept', 0)):,} kept")]
    if "aspect_buckets" in reports:
        lines.append(("buckets", f"{int(reports['aspect_buckets']['num_buckets']):,}"))
    return lines


def _cached(reports: Mapping[str, Report]) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for asset, name in (("vae_latents", "latents"), ("text_embeddings", "captions")):
        if asset in reports:
            report = reports[asset]
            text = f"{int(report['encoded']):,} encoded, {int(report['reused']):,} reused"
            text += f", {int(report['failed']):,} failed" if report.get("failed") else ""
            lines.append((name, text))
    return lines


def _checked(checks: Sequence[CheckResult]) -> list[tuple[str, str]]:
    if not checks:
        return []
    passed = sum(check.passed for check in checks if check.gate)
    closed = sum(check.closes for check in checks)
    warned = [check for check in checks if not check.passed and not check.closes]
    text = f"{passed:,} passed" + (f", {closed:,} closed" if closed else "")
    lines = [("gates", f"{text}, {counted(len(warned), 'warning')}")]
    lines += [("warning", f"{each.asset}, {each.name}: {each.text}") for each in warned[:MAX_WARNINGS]]
    if len(warned) > MAX_WARNINGS:
        lines.append(("warning", f"and {len(warned) - MAX_WARNINGS:,} more"))
    return lines


def _trained(seen: RunResult) -> list[tuple[str, str]]:
    report = seen.reports.get("trained_lora")
    if report is None:
        return []
    text = counted(int(report["steps"]), "step")
    if report.get("first_loss") is not None:
        text += f", loss {report['first_loss']:.4f} at first, {report['last_loss']:.4f} at last"
    if not report["launched"]:
        text += "; finished before and unchanged"
    elif report.get("resumed_from"):
        text += f"; resumed from step {int(report['resumed_from']):,}"
    return [("training", text), ("LoRA", str(seen.output_dir / "lora"))]
