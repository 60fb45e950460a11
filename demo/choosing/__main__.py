"""Train and measure the runs of the study that are missing, one after another, and print the report.

    python -m demo.choosing outputs/choosing            # stop it at any time; finished runs stay
    python -m demo.choosing outputs/choosing --runs 0   # the report only
    python -m demo.choosing outputs/choosing --part 1/2 # half of the missing runs; 2/2 in a second process

The results are in demo/results/choices.jsonl, one line per run and step. `concept` and `known` have a text
per prompt with a digit per picture, 1 if it is right.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from demo.choosing.datasets import study_datasets
from demo.choosing.report import read_runs, report
from demo.choosing.runs import (
    Artist,
    StudyRun,
    results,
    study_runs,
    train,
)
from pipeline.recipe.project import project_root

CHOICES_FILE = project_root() / "demo" / "results" / "choices.jsonl"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of the cache and of the run that is being trained")
    parser.add_argument("--runs", type=int, help="maximum number of runs to add; all by default")
    parser.add_argument("--part", default="1/1", help="part of the missing runs, such as 1/2")
    arguments = parser.parse_args()

    finished = {run.name for run in read_runs(CHOICES_FILE)}
    part, num_parts = map(int, arguments.part.split("/"))
    missing = [run for run in study_runs() if run.name not in finished]
    missing = missing[part - 1 :: num_parts][: arguments.runs]
    if missing:
        add_runs(missing, arguments.folder.absolute(), CHOICES_FILE)
    print(report(read_runs(CHOICES_FILE)))


def add_runs(missing: Sequence[StudyRun], folder: Path, results_file: Path) -> None:
    """Train and measure runs one after another, and add their results to a file."""
    import torch

    from demo.learned import load_pipeline
    from pipeline.models.worker.loading import keep_quiet

    keep_quiet()
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    artist = Artist(load_pipeline(project_root() / "demo" / "base"))
    datasets = study_datasets()
    for run in missing:
        dataset, code, start_s = datasets[run.dataset], _code(), _cpu_s()
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            recipe = train(run, dataset, Path(scratch), folder / "cache")
            trained_s = _cpu_s()
            lines = results(run, dataset, recipe, artist)
        lines[0]["code"] = code
        lines[0]["cpu_seconds"]["training"] = round(trained_s - start_s, 1)
        print(f"{run.name}: CPU seconds {lines[0]['cpu_seconds']}", flush=True)

        # One write at the end, so that an interrupted run leaves no lines.
        results_file.parent.mkdir(exist_ok=True)
        with results_file.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def _cpu_s() -> float:
    """Return the CPU time of this process and of the ended processes that it started."""
    return sum(os.times()[:4])


def _code() -> dict[str, str]:
    """Return git's id of the folder and files that decide the results, with a plus if they changed since.

    Unlike the id of a commit, it stays the same when a branch is rebased.
    """

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=project_root(), capture_output=True, text=True, check=False)

    ids: dict[str, str] = {}
    for path in ("pipeline", "demo/choosing/datasets.py", "demo/choosing/runs.py"):
        is_changed = git("diff", "--quiet", "HEAD", "--", path).returncode != 0
        ids[path] = git("rev-parse", "--short=12", f"HEAD:{path}").stdout.strip() + "+" * is_changed
    return ids


if __name__ == "__main__":
    main()
