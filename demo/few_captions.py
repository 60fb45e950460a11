"""The studies of the caption swap and of several defects with `diagnosis: {others: 8}`.

    python -m demo.few_captions outputs/few            # ten seeds, half a minute each; stop it at any time
    python -m demo.few_captions outputs/few --seeds 0  # the tables of the stored results

The results are in demo/results/few_captions.jsonl, one line per seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from demo import defects, diagnosing
from demo.stored_results import Result, run_study
from pipeline.recipe.project import project_root

RESULTS = project_root() / "demo" / "results" / "few_captions.jsonl"

FEW = {"others": 8}
"""Section `diagnosis` of the recipe."""


def trial(folder: Path, cache: Path, seed: int) -> Result:
    """Return the results of both studies for a seed."""
    swap, several = folder / "swap", folder / "several"
    swap.mkdir()
    figures = diagnosing.figures(swap, cache, seed, diagnosis=FEW)
    return {**figures, "several": defects.trial(several, cache, seed, diagnosis=FEW)}


def report(results: Sequence[Result]) -> Iterator[str]:
    """Yield the tables of docs/diagnosis.md as Markdown."""
    yield from diagnosing.report(results)
    yield ""
    yield from defects.report([{"seed": each["seed"], **each["several"]} for each in results])


if __name__ == "__main__":
    run_study(__doc__, RESULTS, trial, report)
