"""Latentline next to other trainers.

python -m bench.peers --onetrainer DIR --sd-scripts DIR --simpletuner DIR

Each folder is a checkout with its own virtual environment in `.venv` or `venv`; trainers without a folder are
not in the table. `python -m bench.page` adds the table to docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from bench import results
from bench.peers import onetrainer, ours, sd_scripts, simpletuner
from bench.peers.base import make_base
from bench.peers.race import race
from bench.peers.table import table
from bench.peers.trainer import Task, Trainer, checkout_version

PEERS = {
    "SimpleTuner": (simpletuner.start, simpletuner.NOTE),
    "OneTrainer": (onetrainer.start, ""),
    "sd-scripts": (sd_scripts.start, sd_scripts.NOTE),
}
"""Functions that start each trainer, and their notes."""


def main() -> None:
    """Measure all given trainers, print the table, and store the JSON."""
    options = _options()
    given: dict[str, Path | None] = {
        "SimpleTuner": options.simpletuner,
        "OneTrainer": options.onetrainer,
        "sd-scripts": options.sd_scripts,
    }
    trainers = [
        Trainer("bare process", results.commit(), ours.plain),
        Trainer("Latentline", results.commit(), ours.latentline),
        *(peer(name, checkout.resolve()) for name, checkout in given.items() if checkout),
    ]
    with tempfile.TemporaryDirectory(prefix="latentline-bench-") as name:
        folder = Path(name)
        task = Task(folder / "base", options.photographs, edge=256, rank=16, steps=options.steps)
        make_base(task.base)
        measured = race(trainers, task, folder, rounds=options.rounds, num_cached=options.cached)
    run: dict[str, Any] = {
        "machine": results.machine(),
        "commit": results.commit(),
        "full": False,
        "figures": {},
        "peers": {
            "photographs": options.photographs,
            "cached": options.cached,
            "steps": options.steps,
            "rounds": options.rounds,
            "trainers": measured,
        },
    }
    print("\n".join(table(run["peers"])))
    results.save(run, options.out)
    print(f"stored in {options.out}")


def peer(name: str, checkout: Path) -> Trainer:
    """Return the trainer of that name in a checkout."""
    start, note = PEERS[name]
    return Trainer(name, checkout_version(checkout), partial(start, checkout), note)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers",
        description="Compare Latentline with unmodified checkouts of other trainers, in alternating rounds.",
    )
    for name in PEERS:
        parser.add_argument(f"--{name.lower()}", type=Path, metavar="DIR", help=f"checkout of {name}")
    parser.add_argument("--rounds", type=int, default=3, help="number of measured rounds")
    parser.add_argument("--photographs", type=int, default=60, help="number of photographs")
    parser.add_argument(
        "--cached", type=int, default=5000, help="number of photographs in the full caches of another start"
    )
    parser.add_argument("--steps", type=int, default=20, help="steps of each run")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1] / "results" / "peers.json", help="JSON file"
    )
    options = parser.parse_args()
    if options.steps > options.photographs:
        # OneTrainer counts its steps from 1 in each epoch.
        parser.error(f"--steps must be at most --photographs ({options.photographs}), got {options.steps}")
    return options


if __name__ == "__main__":
    main()
