"""Results of studies in demo/results, a line per unit of work, so that a study can be stopped at any time."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Result = dict[str, Any]
"""JSON object of a line."""


def read_results(file: Path) -> list[Result]:
    """Return the stored results by seed; none without a file."""
    lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    return sorted(map(json.loads, lines), key=lambda each: each["seed"])


def add_result(file: Path, result: Result) -> None:
    """Append a line."""
    file.parent.mkdir(exist_ok=True)
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(result, separators=(",", ":")) + "\n")


def run_study(
    description: str | None,
    file: Path,
    trial: Callable[[Path, Path, int], Result],
    report: Callable[[Sequence[Result]], Iterable[str]],
    *,
    seeds: int = 10,
) -> None:
    """Run the command of a study: add the seeds that are missing, and print the report of all.

    Args:
        description: Text of `--help`.
        file: File of the results.
        trial: Returns the result of a seed. It gets an empty folder, the folder of the cache, and the seed.
        report: Returns the lines of the report.
        seeds: Number of seeds without `--seeds`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of the cache and of the datasets in work")
    parser.add_argument("--seeds", type=int, default=seeds, help="number of seeds; stored ones are skipped")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    stored = {each["seed"] for each in read_results(file)}
    for seed in range(arguments.seeds):
        if seed not in stored:
            with tempfile.TemporaryDirectory(dir=folder) as own:
                result = trial(Path(own), folder / "cache", seed)
            add_result(file, {"seed": seed, **result})
    print("\n".join(report(read_results(file))))
