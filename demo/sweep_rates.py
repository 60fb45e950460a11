"""Range tests of the learning rate for the seeds of the study of sweeps, whose grids have the best rates.

    python -m demo.sweep_rates outputs/sweeping

The recipe's rate is 0.001 for all seeds, which draws no picture right. The results are in
demo/results/sweep_rates.jsonl, one line per seed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from demo.forked_launch import ForkedLaunch
from demo.sweep_report import proposals, read_lines
from demo.sweeping import RESULTS, demo_recipe, fill_cache
from pipeline.storage.tables import Tables
from pipeline.sweep.range_test import find_learning_rate
from pipeline.trained_lora.run_folder import RunLayout, read_metrics

RATES = RESULTS.with_name("sweep_rates.jsonl")


def add_proposals(seeds: Sequence[int], folder: Path, results: Path) -> None:
    """Run the range test of seeds, and append a line for each to the results."""
    for seed in seeds:
        recipe = demo_recipe(folder / f"seed-{seed}", seed, folder / "cache")
        fill_cache(recipe)
        tables = Tables(recipe.output_dir)
        inputs = (tables.read("vae_latents"), tables.read("text_embeddings"))
        found = find_learning_rate(recipe, *inputs, launch=ForkedLaunch(recipe.accelerate), log=print)
        layout = RunLayout(recipe.output_dir / "runs" / found.run)
        steps = read_metrics(layout.metrics, recipe.training.num_steps)
        measured = read_metrics(layout.validation, recipe.training.num_steps)
        line = {
            "seed": seed,
            "rate": found.rate,
            "why": found.why,
            "rates": [float(f"{step['learning_rate']:.3g}") for step in steps],
            "losses": [round(each["loss"], 5) for each in measured],
        }
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of the cache and of the runs")
    folder = parser.parse_args().folder.absolute()

    lines = read_lines(RESULTS)
    missing = {line["seed"] for line in lines} - {line["seed"] for line in read_lines(RATES)}
    add_proposals(sorted(missing), folder, RATES)
    print(proposals(lines, read_lines(RATES)))


if __name__ == "__main__":
    main()
