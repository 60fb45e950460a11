"""Checks of captions: the model wrote something readable, to its end, and without repeating itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.errors import counted
from pipeline.reporting.findings import MAX_ROWS, CheckContext, Finding, Outcome, findings
from pipeline.validated_dataset.captions import is_readable

if TYPE_CHECKING:
    from pipeline.reporting.reports import Report

STAGE = "captions"

MAX_LOOP_WORDS = 8
"""Largest number of words of a passage that is searched for repetitions."""

MIN_REPEATS = 4
"""Smallest number of times that a passage follows itself to be a loop."""

MIN_LOOP_WORDS = 6
"""Smallest number of words in a loop: "very very very very" is no loop."""


def run(context: CheckContext) -> list[Finding]:
    """Return the findings of all checks, from the report of the last captions."""
    report = context.report(STAGE)
    if report is None:
        again = "run the job again, which captions nothing twice"
        missing = Outcome(False, "the report of the captions is missing or damaged", again)
        return findings(context, STAGE, dict.fromkeys(_CHECKS, missing))
    return findings(context, STAGE, {name: check(report) for name, check in _CHECKS.items()})


def _captions_readable(report: Report) -> Outcome:
    rows, number = report["named"]["unreadable"], report["unreadable"]
    numbers = {"captions": report["samples"], "num_rows": number}
    if not number:
        summary = f"the model wrote {counted(report['samples'], 'readable caption')}"
        return Outcome(True, summary, numbers=numbers)
    summary = f"{counted(number, 'image')} without a readable caption, first {rows[0]['sample_id']}"
    fix = "change captions.prompt or lower captions.tagger.threshold, or write captions for these images"
    return Outcome(False, summary, fix, rows, numbers)


def _captions_complete(report: Report) -> Outcome:
    rows, number = report["named"]["cut"], report["cut"]
    if not number:
        return Outcome(True, "each caption ends where the model ended it", numbers={"num_rows": 0})
    summary = f"{counted(number, 'caption was', 'captions were')} cut off, first {rows[0]['sample_id']}"
    fix = "raise captions.max_tokens, or ask for shorter captions in captions.prompt"
    return Outcome(False, summary, fix, rows, {"num_rows": number})


def _captions_looping(report: Report) -> Outcome:
    rows, number = report["named"]["looping"], report["looping"]
    if not number:
        return Outcome(True, "no caption repeats itself", numbers={"num_rows": 0})
    captions = counted(number, "caption repeats", "captions repeat")
    summary = f"{captions} a passage {MIN_REPEATS} times or more, first {rows[0]['sample_id']}"
    fix = "change captions.prompt, lower captions.max_tokens, or use another model"
    return Outcome(False, summary, fix, rows, {"num_rows": number})


_CHECKS: dict[str, Callable[[Report], Outcome]] = {
    "captions_readable": _captions_readable,
    "captions_complete": _captions_complete,
    "captions_looping": _captions_looping,
}


def judged(table: pl.DataFrame, refused: Sequence[tuple[str, str]]) -> Report:
    """Return the part of the report that the checks read: numbers of captions, and the first of each kind.

    `refused` are images that the model's processor refuses, each with the reason.
    """
    empty = table.filter(~pl.col("caption").map_elements(is_readable, return_dtype=pl.Boolean))
    looping = table.filter(pl.col("caption").map_elements(has_loop, return_dtype=pl.Boolean))
    unreadable = [{"sample_id": each, "what": "no readable text"} for each in empty["sample_id"]]
    unreadable += [{"sample_id": sample_id, "what": reason} for sample_id, reason in refused]
    rows = {"unreadable": unreadable, "cut": _rows(table.filter("cut")), "looping": _rows(looping)}
    numbers = {name: len(each) for name, each in rows.items()}
    return {**numbers, "named": {name: each[:MAX_ROWS] for name, each in rows.items()}}


def has_loop(text: str) -> bool:
    """Return whether a passage of a text follows itself `MIN_REPEATS` times, as models do that are stuck."""
    words = re.findall(r"\w+", text.casefold())
    for length in range(1, MAX_LOOP_WORDS + 1):
        repeats = max(MIN_REPEATS, -(-MIN_LOOP_WORDS // length))
        equal = 0
        for index in range(length, len(words)):
            equal = equal + 1 if words[index] == words[index - length] else 0
            if equal >= length * (repeats - 1):
                return True
    return False


def _rows(table: pl.DataFrame) -> list[dict[str, Any]]:
    return table.select("sample_id", text=pl.col("caption").str.slice(0, 200)).to_dicts()
