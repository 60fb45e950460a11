"""What each kind of adapter learns of a new name, over learning rates and seeds.

    OMP_NUM_THREADS=1 python -m demo.adapter_kinds outputs/adapter_kinds
    python -m demo.adapter_kinds outputs/adapter_kinds --kinds     # none: only the table

All kinds train the linear layers of the denoiser's blocks for the same steps (`demo.new_name`), because OFT
adapts neither convolutions nor text encoders. Each rate is tried with one seed, and the rate that draws most
pictures right gets two more. The results are in demo/results/adapter_kinds.jsonl, one line per run; a study
that was stopped continues.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from demo.defects import nothing
from demo.new_name import concept_score, known_score, new_name_job, teach
from demo.stored_results import Result, add_result, read_results
from pipeline.recipe.project import project_root

RESULTS = project_root() / "demo" / "results" / "adapter_kinds.jsonl"

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "tlora": {"timestep_ranks": {"min_rank": 8}},
    "dora": {"dora": True},
    "loha": {"kind": "loha"},
    "lokr": {"kind": "lokr"},
    "oft": {"kind": "oft"},
}
"""Changes of `training.lora`, of rank 16 where the kind has one."""

RATES: dict[str, tuple[float, ...]] = {
    "lora": (2e-3, 4e-3, 1e-2),
    "tlora": (2e-3, 4e-3, 1e-2),
    "dora": (2e-3, 4e-3, 1e-2),
    "loha": (4e-3, 1e-2, 2e-2),
    "lokr": (4e-3, 1e-2, 2e-2),
    "oft": (4e-3, 1e-2, 2e-2),
}
"""Learning rates by kind."""

SEEDS = (0, 1, 2)
"""Seeds of the best rate; the first one is for all rates."""


def lora_settings(kind: str) -> dict[str, Any]:
    """Return the changes of the demo's `training.lora`."""
    return {"targets": "blocks", "conv_rank": None, "text_encoders": None, **KINDS[kind]}


def score_run(kind: str, rate: float, seed: int, folder: Path) -> Result:
    """Train an adapter, draw with it, and return a line of the results."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        settings = {"learning_rate": rate, "lora": lora_settings(kind)}
        job, _ = new_name_job(Path(own) / "dataset", folder / "cache", seed, nothing, **settings)
        adapter = teach(job)
        scores = {
            "concept": concept_score(job.base, adapter, seed),
            "known": known_score(job.base, adapter),
            "known_before": known_score(job.base, None),
        }
    return {"kind": kind, "rate": rate, "seed": seed} | {
        name: round(each, 3) for name, each in scores.items()
    }


def best_rate(lines: Sequence[Result], kind: str) -> float:
    """Return the rate at which the first seed of a kind drew most pictures right."""
    tried = [line for line in lines if line["kind"] == kind and line["seed"] == SEEDS[0]]
    return max(tried, key=lambda line: (line["concept"] + line["known"], line["rate"]))["rate"]


def add_runs(kinds: Sequence[str], folder: Path, results: Path) -> None:
    """Train what the results lack, and append a line for each run."""
    for kind in kinds:
        for rate in RATES[kind]:
            _add(kind, rate, SEEDS[0], folder, results)
        best = best_rate(read_results(results), kind)
        for seed in SEEDS[1:]:
            _add(kind, best, seed, folder, results)


def _add(kind: str, rate: float, seed: int, folder: Path, results: Path) -> None:
    done = {(line["kind"], line["rate"], line["seed"]) for line in read_results(results)}
    if (kind, rate, seed) not in done:
        add_result(results, score_run(kind, rate, seed, folder))


def report(lines: Sequence[Result]) -> str:
    """Return a table in Markdown with the scores of each kind at its best rate, and of the other rates."""
    rows = [
        "| kind | rate | concept: seeds 0 to 2, mean | known shapes: mean | concept at other rates |",
        "|---|---|---|---|---|",
    ]
    for kind in [kind for kind in KINDS if any(line["kind"] == kind for line in lines)]:
        own = [line for line in lines if line["kind"] == kind]
        best = best_rate(own, kind)
        at_best = [line for line in own if line["rate"] == best]
        concept = [line["concept"] for line in at_best]
        known = fmean(line["known"] for line in at_best)
        scores = ", ".join(f"{value:.2f}" for value in concept)
        others = ", ".join(f"{line['rate']:g}: {line['concept']:.2f}" for line in own if line["rate"] != best)
        rows.append(f"| {kind} | {best:g} | {scores}; **{fmean(concept):.2f}** | {known:.2f} | {others} |")
    return "\n".join(rows)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of the cache and of the runs")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=[*KINDS], help="kinds to train")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)

    add_runs(arguments.kinds, folder, RESULTS)
    print(report(read_results(RESULTS)))


if __name__ == "__main__":
    main()
