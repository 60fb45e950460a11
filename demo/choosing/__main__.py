"""Train and measure the runs of the study that are missing, one after another, and print the report.

    python -m demo.choosing outputs/choosing            # stop it at any time; finished runs stay
    python -m demo.choosing outputs/choosing --runs 0   # the report only

The results are in demo/results/choosing.jsonl, one line per run and step.
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
from demo.choosing.runs import Artist, StudyRun, results, study_runs, train
from pipeline.recipe.project import project_root

RESULTS = project_root() / "demo" / "results" / "choosing.jsonl"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of the cache and of the run that is being trained")
    parser.add_argument("--runs", type=int, help="maximum number of runs to add; all by default")
    arguments = parser.parse_args()

    finished = {run.name for run in read_runs(RESULTS)}
    missing = [run for run in study_runs() if run.name not in finished][: arguments.runs]
    if missing:
        _add_runs(missing, arguments.folder.absolute())
    print(report(read_runs(RESULTS)))


def _add_runs(missing: Sequence[StudyRun], folder: Path) -> None:
    import torch

    from demo.learned import load_pipeline
    from pipeline.models.worker.loading import keep_quiet

    keep_quiet()
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    artist = Artist(load_pipeline(project_root() / "demo" / "base"))
    for run in missing:
        dataset, commit, start_s = study_datasets()[run.dataset], _commit(), _cpu_s()
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            recipe = train(run, dataset, Path(scratch), folder / "cache")
            trained_s = _cpu_s()
            lines = results(run, dataset, recipe, artist)
        seconds = {"training": round(trained_s - start_s), "measuring": round(_cpu_s() - trained_s)}
        print(f"{run.name}: CPU seconds {seconds}", flush=True)

        # One write at the end, so that an interrupted run leaves no lines.
        lines[0] |= {"commit": commit, "cpu_seconds": seconds}
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def _cpu_s() -> float:
    """Return the CPU time of this process and of the ended processes that it started."""
    return sum(os.times()[:4])


def _commit() -> str:
    """Return the commit of the code, with a plus if it has changed since; the results do not count."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=project_root(), capture_output=True, text=True, check=False)

    commit = git("rev-parse", "--short=12", "HEAD").stdout.strip()
    is_changed = git("diff", "--quiet", "HEAD", "--", ".", ":!demo/results").returncode != 0
    return commit + "+" * is_changed


if __name__ == "__main__":
    main()
