"""The summary of a run on standard output or error, and on the pages of GitHub Actions."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from pipeline.escaping import markdown_block, printable_lines, without_secrets
from pipeline.reporting.colours import coloured
from resources.problems import INTERRUPTIONS
from resources.run_problems import problem_between_steps
from resources.run_summary import RunSummary, summarize_run

if TYPE_CHECKING:
    from dagster import DagsterInstance

    from pipeline.recipe import Recipe

_MESSAGE, _PROPERTY = "%\r\n", "%\r\n:,"
"""Characters that GitHub's commands escape in a message and in a property."""

_RECIPE_LINE = re.compile(r"(?P<file>[^\n]+?\.ya?ml):(?P<line>[0-9]+)")


def print_summary(
    instance: DagsterInstance, run_id: str, recipes: Sequence[Recipe], *, error: BaseException | None
) -> None:
    """Print the summary of a run that ends, with all of a bad run on standard error.

    `error` is the error or interruption that ends the run; None after its last step.
    """
    try:
        summary = summarize_run(instance, run_id, recipes, error=error)
    # A summary must not end the run, for example if Dagster's database is away.
    except Exception as err:
        reason = f"{type(err).__name__}: {err}".splitlines()[0]
        warning = f"warning: the run {run_id} cannot be summarized: {reason}"
        problems = (
            [] if error is None or isinstance(error, INTERRUPTIONS) else [str(problem_between_steps(error))]
        )
        write_parts([warning, *problems], sys.stderr)
        return
    write_summary(summary)


def write_summary(summary: RunSummary) -> None:
    """Write the numbers of a good run to standard output, or all of a bad one to standard error.

    Both also appear on the summary page of GitHub Actions.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    parts = [*summary.numbers, *map(str, summary.problems)]
    write_parts(parts, sys.stderr if summary.problems else sys.stdout)
    _add_to_github_page(parts)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        _annotate(summary)


def _add_to_github_page(parts: Sequence[str]) -> None:
    """Add the parts as a code block to the summary page of a step of GitHub Actions, if this is one."""
    page = os.environ.get("GITHUB_STEP_SUMMARY")
    if page:
        text = "\n\n".join(without_secrets(part) for part in parts)
        with suppress(OSError), Path(page).open("a", encoding="utf-8") as file:
            file.write(f"{markdown_block(text)}\n")


def _annotate(summary: RunSummary) -> None:
    """Write a command of GitHub Actions for each problem, which GitHub shows at a line of the recipe."""
    lines: list[str] = []
    for problem in summary.problems:
        file, number = summary.recipe_lines.get(problem, ("", 0))
        # Errors in a recipe name their line.
        if named := _RECIPE_LINE.match(problem.where):
            file, number = named["file"], int(named["line"])
        place = f"file={_escaped(file, _PROPERTY)},line={number}," if file else ""
        message = _escaped(printable_lines(without_secrets(str(problem))), _MESSAGE)
        lines.append(f"::error {place}title=Latentline::{message}\n")
    with suppress(OSError, ValueError):
        os.write(
            sys.stderr.fileno(), "".join(lines).encode(sys.stderr.encoding or "utf-8", "backslashreplace")
        )


def _escaped(text: str, characters: str) -> str:
    # As GitHub's own toolkit does. % comes first.
    for character in characters:
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def write_parts(parts: Sequence[str], stream: TextIO) -> None:
    """Write each part after an empty line."""
    # The error of a bug quotes names and captions as they are.
    text = "".join(f"\n{printable_lines(without_secrets(part))}\n" for part in parts)

    # The stream's encoding may lack a character, and its reader may have gone away.
    with suppress(OSError, ValueError):
        os.write(
            stream.fileno(), coloured(text, stream).encode(stream.encoding or "utf-8", "backslashreplace")
        )
