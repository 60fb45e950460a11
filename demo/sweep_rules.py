"""Which rule of halving finds the best variant of the demo, compared on grids that are trained completely.

    python -m demo.sweep_rules outputs/sweep_rules               # stop it at any time; finished seeds stay
    python -m demo.sweep_rules outputs/sweep_rules --seeds       # only the table

Variants, truth and cost are the same as in demo.sweeping, with other seeds. All variants of a seed are
trained completely, with a LoRA and the losses on held-out images at each step at which a rule judges them.
The rules then read the same runs, so they differ in nothing but which variants go on. Pictures are drawn and
scored as in the evaluation, but in batches. The results are in demo/results/sweep_rules.jsonl.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl

from demo.choosing.datasets import concept_pictures, study_datasets
from demo.choosing.runs import Artist, study_features
from demo.forked_launch import ForkedLaunch
from demo.score import WorldScorer
from demo.sweep_report import read_lines, rules_report
from demo.sweeping import DATASET, GRID, RESULTS, STEPS, demo_recipe, fill_cache, truth
from pipeline.evaluation.numbers import measure as measure_pictures
from pipeline.recipe import Recipe
from pipeline.recipe.overrides import with_values
from pipeline.recipe.project import project_root
from pipeline.recipe.sweep import HalvingSettings
from pipeline.storage.tables import Tables
from pipeline.sweep.halving import num_kept, position, rungs
from pipeline.sweep.judging import Judged, decide, judge
from pipeline.sweep.scores import BY_IMAGE, expected_cells, picture_cells, validation_cells
from pipeline.sweep.stage import sweep
from pipeline.sweep.variants import variants
from pipeline.trained_lora.export.lora_files import layout_file
from pipeline.trained_lora.job import read_job
from pipeline.trained_lora.run_folder import RunLayout, lora_steps, read_metrics

RULES_RESULTS = RESULTS.with_name("sweep_rules.jsonl")

SEEDS = range(11, 18)
"""Seeds of no other study. Only the first one was measured before the rule of expected losses was added."""

SAVE_EVERY = 7

PICTURES = 16
"""Pictures of the evaluation for each prompt."""

CONTENDERS = (5, 6, 7, 8, 9, 10)
"""Rates of 0.004 to 0.016. The other variants drew at most half of their pictures right in ten seeds."""


@dataclass(frozen=True)
class Rule:
    """A rule of halving.

    Attributes:
        halving: The rungs, and how many variants go on.
        expects: Whether losses are extrapolated to the next rung.
        pictures_from: Fraction of the steps from which pictures decide; before it, held-out images do.
        pictures: Pictures per prompt.
    """

    halving: HalvingSettings
    expects: bool
    pictures_from: float
    pictures: int


_HALF = HalvingSettings(first=0.175, keep=0.5)

RULES = {
    "losses, a third goes on": Rule(HalvingSettings(first=0.175, keep=1 / 3), False, 1.0, 8),
    "losses": Rule(_HALF, False, 1.0, PICTURES),
    "losses, then pictures": Rule(_HALF, False, 0.5, PICTURES),
    "expected losses, then pictures": Rule(_HALF, True, 0.5, PICTURES),
    "expected losses": Rule(_HALF, True, 1.0, PICTURES),
}
"""Rules by their name in the results.

The first one has the rungs of the first study, each at most three steps earlier. The last one is the rule of
a sweep with `judge: evaluation`, without the pictures of earlier rungs, which decide nothing.
"""

_CELLS = [(each.caption, seed) for each in concept_pictures() for seed in range(PICTURES)]
"""Prompt and seed of each picture."""

_TRAINING: dict[tuple[str | int, ...], Any] = {
    ("training", "checkpoint_every"): SAVE_EVERY,
    ("training", "validate_every"): SAVE_EVERY,
    ("evaluation", "pictures"): PICTURES,
}


class TrainedGrid:
    """The completely trained variants of a seed, judged at any step with a LoRA."""

    def __init__(self, recipe: Recipe, runs: Sequence[str], artist: Artist) -> None:
        """`runs` has the name of each variant's run."""
        self.recipe, self._artist = recipe, artist
        self._variants = variants(recipe)
        self._runs = dict(enumerate(runs, start=1))

    @property
    def names(self) -> dict[int, str]:
        """Texts of the variants."""
        return {variant.number: variant.text for variant in self._variants}

    def folder(self, variant: int) -> Path:
        """Return the folder of a variant's run."""
        return self.recipe.output_dir / "runs" / self._runs[variant]

    def by_losses(self, alive: Sequence[int], step: int, *, since: int = 0, ahead: float = 0.0) -> Judged:
        """Compare variants by their losses on held-out images, extrapolated from the step `since`."""
        cells: dict[int, pl.DataFrame] = {}
        for variant in alive:
            job = read_job(self.folder(variant) / "order.json")
            now, earlier = (validation_cells(job, each, seed=0) for each in (step, since))
            cells[variant] = expected_cells(now, earlier, ahead=ahead)
        return judge(cells, self._costs(alive, step), {})

    def by_pictures(self, alive: Sequence[int], step: int, pictures: int) -> Judged:
        """Compare variants by the first pictures of each prompt."""
        scores = {
            variant: [self._scored(variant, step).filter(pl.col("seed") < pictures)] for variant in alive
        }
        quality, broken = picture_cells(scores, {}, pictures=pictures)
        return judge(quality, self._costs(alive, step), broken)

    def _costs(self, alive: Sequence[int], step: int) -> dict[int, tuple[int, int, int]]:
        folders = {variant: lora_steps(RunLayout(self.folder(variant)))[step] for variant in alive}
        return {
            variant: (STEPS, (folder / layout_file("diffusers", "")).stat().st_size, variant)
            for variant, folder in folders.items()
        }

    def _scored(self, variant: int, step: int) -> pl.DataFrame:
        """Return the scores of a variant's pictures, which a file holds after the first call."""
        stored = self.recipe.output_dir / "pictures" / f"{variant}-{step}.parquet"
        if not stored.is_file():
            file = lora_steps(RunLayout(self.folder(variant)))[step] / layout_file("diffusers", "")
            drawn = [
                (number, "concept", *cell, picture)
                for number, lora in ((0, None), (step, file))
                for cell, picture in zip(
                    _CELLS, self._artist.draw(self._artist.load(lora), _CELLS), strict=True
                )
            ]
            folder = self.recipe.source.parents[1]
            features = study_features("world", WorldScorer(), study_datasets()[DATASET], drawn, folder=folder)
            stored.parent.mkdir(exist_ok=True)
            measure_pictures([features]).scores.filter(step=step).write_parquet(stored)
        return pl.read_parquet(stored)


def apply(rule: Rule, grid: TrainedGrid) -> dict[str, Any]:
    """Return what a sweep with this rule trains and finds."""
    alive, before, steps = sorted(grid.names), 0, 0
    rows: list[list[Any]] = []
    winner: int | None = None
    for fraction, later in pairwise([*rungs(rule.halving), 1.0]):
        step, following = (position(each, STEPS) for each in (fraction, later))
        steps += len(alive) * (step - before)
        if fraction >= rule.pictures_from:
            judged = grid.by_pictures(alive, step, rule.pictures)
        else:
            ahead = (following - step) / (step - before) if rule.expects else 0.0
            judged = grid.by_losses(alive, step, since=before, ahead=ahead)
        rows += _rows(judged, step)
        winner = decide(judged, grid.names, num_variants=len(grid.names)).winner
        if fraction < 1.0:
            alive = sorted([*judged.standings][: num_kept(rule.halving.keep, len(alive))])
        before = step
    return {"steps": steps, "reached": alive, "winner": winner, "judged": rows}


def _rows(judged: Judged, step: int) -> list[list[Any]]:
    """Return variant, step, score, and how far it is behind the best; the best first."""
    return [
        [variant, step, round(standing.score.mean, 5), round(standing.behind.mean, 5)]
        for variant, standing in judged.standings.items()
    ]


def trained_grid(recipe: Recipe, launch: ForkedLaunch, artist: Artist) -> tuple[TrainedGrid, int | None]:
    """Train all variants completely unless they are; return them, and the winner by their losses."""
    tables = Tables(recipe.output_dir)
    inputs = (tables.read("vae_latents"), tables.read("text_embeddings"))
    whole = with_values(recipe, {("sweep", "halving"): None}, place="demo.sweep_rules")
    complete = sweep(whole, *inputs, launch=launch, log=_log)
    runs = [row["run"] for row in complete.report["variants"]]
    return TrainedGrid(recipe, runs, artist), complete.report["winner"]


def measure(grid: TrainedGrid, by_losses: int | None, artist: Artist) -> dict[str, Any]:
    """Return the line of a seed."""
    folders = [grid.folder(variant) for variant in sorted(grid.names)]
    complete = grid.by_pictures(CONTENDERS, STEPS, PICTURES)
    return {
        "seed": grid.recipe.training.seed,
        "grid": GRID,
        "steps_of_all": STEPS * len(folders),
        "rules": {name: apply(rule, grid) for name, rule in RULES.items()},
        "complete_by_losses": by_losses,
        "complete_by_pictures": decide(complete, grid.names, num_variants=len(folders)).winner,
        "complete_judged": _rows(complete, STEPS),
        "losses": [_losses(folder) for folder in folders],
        "truth": truth(
            artist, [folder / "lora" for folder in folders], grid.recipe.output_dir / "truth.json"
        ),
    }


def _losses(folder: Path) -> list[list[float]]:
    """Return the loss on each held-out image, before the training and after each `SAVE_EVERY` steps."""
    lines = read_metrics(RunLayout(folder).validation, STEPS + 1)
    return [[round(loss, 5) for loss in line[BY_IMAGE]] for line in lines]


def _log(text: str) -> None:
    print(text, flush=True)


def add_seeds(seeds: Sequence[int], folder: Path, results: Path) -> None:
    """Measure seeds, and append a line for each to the results."""
    import torch

    from demo.learned import load_pipeline
    from pipeline.models.worker.loading import keep_quiet

    keep_quiet()
    torch.set_num_threads(1)
    artist = Artist(load_pipeline(project_root() / "demo" / "base"))
    for seed in seeds:
        recipe = demo_recipe(folder / f"seed-{seed}", seed, folder / "cache")
        recipe = with_values(recipe, _TRAINING, place="demo.sweep_rules")
        fill_cache(recipe)
        line = measure(*trained_grid(recipe, ForkedLaunch(recipe.accelerate), artist), artist)
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of the cache and of the runs")
    parser.add_argument("--seeds", type=int, nargs="*", default=[*SEEDS], help="seeds, if they are missing")
    arguments = parser.parse_args()

    measured = {line["seed"] for line in read_lines(RULES_RESULTS)}
    if missing := [seed for seed in arguments.seeds if seed not in measured]:
        add_seeds(missing, arguments.folder.absolute(), RULES_RESULTS)
    print(rules_report(read_lines(RULES_RESULTS), read_lines(RESULTS)))


if __name__ == "__main__":
    main()
