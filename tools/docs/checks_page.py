"""docs/checks.md: every check, what it means when it fails, and what to do.

`python -m tools.docs.checks_page` writes it anew.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.recipe import project_root
from pipeline.recipe.gates import SPECS, CheckSpec, specs_of
from pipeline.storage.atomic import write_text

_TOP = """\
# Checks: what each one means, and what to do

Each asset is checked when it is made. A **gate** that fails stops everything downstream and the job ends
with exit status 1; a **warning** is shown and stops nothing. In the UI a check lists what it found, at most
50 rows with numbers; the log says the same in a sentence. What was rejected stands in
`output_dir/tables/rejected.parquet` with reason and fix.

*Execute* at a check in the UI runs it alone: it looks at what the last run left, and at files as they are
now, and makes nothing. *Re-execute from failure* makes the asset whose gate had closed once more.

`checks.allow: [captions_present]` in the recipe opens a gate knowingly, of every asset that has one of that
name: it then warns. Those that say "never open" stay closed: `path_isolation`, and what is exact of the two
caches, since training could not read an entry that is missing or wrong. None opens where no sample is left.

Training asks the gates of the five assets before it itself, as the recipe now reads, whatever was selected;
only the datasets' files are not looked at then: they may be gone.

This page is written by `python -m tools.docs.checks_page`.
"""


def page_text() -> str:
    """The page, in Markdown; the same for the same checks."""
    parts = [_TOP]
    for asset in SPECS:
        parts.append(f"## {asset}\n\n| check | | passes when, or shows | what to do |\n|---|---|---|---|")
        parts += [_row(spec) for spec in specs_of(asset)]
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def page_path() -> Path:
    """Where the page lies."""
    return project_root() / "docs" / "checks.md"


def _row(spec: CheckSpec) -> str:
    kind = ("**gate**" if spec.openable else "**gate**, never open") if spec.gate else "warning"
    return f"| `{spec.name}` | {kind} | {spec.description} | {spec.advice} |"


if __name__ == "__main__":
    write_text(page_path(), page_text())
