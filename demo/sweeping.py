"""What a sweep of the demo costs and finds, compared with training all of its variants completely.

    python -m demo.sweeping outputs/sweeping             # stop it at any time; finished seeds stay
    python -m demo.sweeping outputs/sweeping --seeds 0   # only the report

All variants of a seed are trained completely, with a checkpoint at each step at which halving judges. A
sweep by halving then finds their LoRAs and losses, and trains nothing. Its `steps` are the ones that it
would have trained, because a resumed run is equal to an uninterrupted one. Held-out images decide which
variants go on, and pictures between those that reach the end: as with `judge: evaluation`, but without
the pictures of earlier rungs, which decide nothing. The truth of a variant is the fraction of right
pictures, drawn with seeds that no evaluation uses. The results are in demo/results/sweep.jsonl, one line
per seed. In them, variants went on by the loss of each rung, and not by the one expected at the next rung;
demo.sweep_rules compares both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from demo.choosing.datasets import NAME, SHAPE, concept_pictures, study_datasets
from demo.choosing.runs import Artist, StudyRun, study_recipe
from demo.forked_launch import ForkedLaunch
from demo.score import WorldScorer, score
from demo.sweep_report import read_lines, report
from demo.world import Array
from pipeline.evaluation.prepare import Request, prepare_evaluation
from pipeline.evaluation.report import shown_strength
from pipeline.evaluation.stage import score_pictures
from pipeline.processes.launch import TRAINING_MODULE
from pipeline.recipe import Recipe, load_recipe
from pipeline.recipe.overrides import with_values
from pipeline.recipe.project import project_root
from pipeline.reporting.reports import Stopwatch
from pipeline.storage.tables import Tables
from pipeline.sweep.judging import Decision, decide, judge
from pipeline.sweep.scores import BY_IMAGE, numbered_prompts, picture_cells
from pipeline.sweep.stage import sweep
from pipeline.sweep.variants import variants
from pipeline.trained_lora.export.lora_files import layout_file
from pipeline.trained_lora.run_folder import RunLayout, read_metrics

RESULTS = project_root() / "demo" / "results" / "sweep.jsonl"

DATASET = "few known shapes"

STEPS, SAVE_EVERY = 40, 8

GRID: dict[str, list[Any]] = {
    "training.learning_rate": [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2],
    "training.lora.rank": [4, 16],
}
"""Twelve variants: rates that are too low, rates that are right, and rates that are too high."""

HALVING = {"first": 0.2, "keep": 1 / 3}
"""Twelve variants to step 8, four to step 24 and two to step 40: 40% of all steps."""

PICTURES = 8
"""Pictures of the evaluation for each prompt."""

TRAINING: dict[tuple[str | int, ...], Any] = {
    ("training", "lr_scheduler"): "cosine",
    ("training", "warmup_steps"): 2,
    ("training", "lora", "conv_rank"): None,
    ("evaluation", "pictures"): PICTURES,
    ("sweep", "judge"): "validation_loss",
    # Pictures are compared with held-out ones of the same concept. All captions have the name already.
    ("datasets", 0, "captions", "trigger"): NAME,
    ("datasets", 1, "captions", "trigger"): NAME,
}
"""Settings with which a name is learned in a few seconds."""

FIRST_TRUE, TRUE = 1, 10
"""Pictures per prompt that measure the truth of every variant, and of those that may be the best."""

_NEARLY = 0.2
"""Largest difference to the highest first truth of a variant that may be the best."""

_FIRST_TRUE_SEED = 100_000
"""Seeds of the truth start here; the evaluation uses none of them."""

_SEEDS_PER_PROMPT = 1000


class StudyScorer(WorldScorer):
    """The demo's scorer, which reads the name of the study as the shape that it means."""

    def text_features(self, texts: Sequence[str]) -> Array:
        """Return a float32 array (N, D) for captions of the study."""
        return super().text_features([text.replace(f" {NAME} ", f" {SHAPE} ") for text in texts])


def demo_recipe(folder: Path, seed: int, cache: Path) -> Recipe:
    """Return a recipe with the sweep; its pictures are written into the folder unless they are there."""
    if (folder / "configs").is_dir():
        return with_values(load_recipe(folder / "configs" / "demo.yaml"), TRAINING, place="demo.sweeping")
    folder.mkdir(parents=True)
    drawn = {"role": "concept", "steps": 4, "guidance_scale": 2.5, "height": 64, "width": 64}
    recipe = study_recipe(
        StudyRun(DATASET, 1e-3, seed, STEPS, SAVE_EVERY),
        study_datasets()[DATASET],
        folder,
        cache,
        evaluation={
            "pictures": PICTURES,
            "scorers": ["demo.sweeping:StudyScorer"],
            "prompts": [{"prompt": each.caption, **drawn} for each in concept_pictures()],
        },
        sweep={"grid": GRID, "halving": HALVING, "judge": "validation_loss"},
    )
    return with_values(recipe, TRAINING, place="demo.sweeping")


def fill_cache(recipe: Recipe) -> None:
    """Run the recipe's job up to the caches."""
    from assets.definitions import build_definitions

    build_definitions([recipe]).resolve_job_def(f"{recipe.name}_cache").execute_in_process()


def measure(recipe: Recipe, launch: ForkedLaunch, artist: Artist) -> dict[str, Any]:
    """Train all variants, sweep by halving, and return the line of the results."""
    tables = Tables(recipe.output_dir)
    inputs = (tables.read("vae_latents"), tables.read("text_embeddings"))
    whole = with_values(recipe, {("sweep", "halving"): None}, place="demo.sweeping")
    complete = sweep(whole, *inputs, launch=launch, log=_log)
    num_trainings = launch.launches[TRAINING_MODULE]
    folders = [recipe.output_dir / "runs" / row["run"] for row in complete.report["variants"]]
    true = truth(artist, [folder / "lora" for folder in folders], recipe.output_dir / "truth.json")
    halved = sweep(recipe, *inputs, launch=launch, log=_log)
    assert launch.launches[TRAINING_MODULE] == num_trainings, "halving trains nothing"
    decision = decide_by_pictures(recipe, halved.table, launch)
    return {
        "seed": recipe.training.seed,
        "grid": GRID,
        "halving_settings": HALVING,
        "save_every": SAVE_EVERY,
        "steps": halved.report["steps"],
        "steps_of_all": halved.report["steps_of_all"],
        "winner": decision.winner,
        "why": decision.why,
        "winner_by_loss": halved.report["winner"],
        "complete_winner_by_loss": complete.report["winner"],
        "launches": dict(launch.launches),
        "halving": _rows(halved.table),
        "complete": _rows(complete.table),
        "losses": [_losses(folder) for folder in folders],
        "truth": true,
    }


def decide_by_pictures(recipe: Recipe, table: pl.DataFrame, launch: ForkedLaunch) -> Decision:
    """Return the decision of a sweep with `judge: evaluation` between the variants that reached the end."""
    tables, chosen = Tables(recipe.output_dir), variants(recipe)
    last = table.filter(step=STEPS).sort("variant")
    runs = dict(last.select("variant", "run").iter_rows())
    scores: dict[int, list[pl.DataFrame]] = {}
    for variant, run in runs.items():
        evaluation = prepare_evaluation(
            chosen[variant - 1].recipes[0], Request(run=run, steps=(STEPS,)), log=_log
        )
        scored = score_pictures(evaluation, tables, launch=launch, log=_log, watch=Stopwatch())
        shown = scored.measured.scores.filter(pl.col("strength") == shown_strength(evaluation))
        scores[variant] = [numbered_prompts(shown, evaluation.prompts)]
    quality, broken = picture_cells(scores, {}, pictures=PICTURES)
    folders = {variant: recipe.output_dir / "runs" / run / "lora" for variant, run in runs.items()}
    costs = {
        variant: (STEPS, (folder / layout_file("diffusers", "")).stat().st_size, variant)
        for variant, folder in folders.items()
    }
    names = {variant.number: variant.text for variant in chosen}
    return decide(judge(quality, costs, broken), names, num_variants=len(chosen))


def _rows(table: pl.DataFrame) -> list[list[Any]]:
    """Return variant, step, score, and the difference to the best with its interval."""
    columns = ("variant", "step", "score", "behind", "low", "high")
    return [
        [round(value, 5) if isinstance(value, float) else value for value in row]
        for row in table.select(columns).rows()
    ]


def _losses(folder: Path) -> list[list[float]]:
    """Return the loss on each held-out image, before the training and after each `SAVE_EVERY` steps."""
    lines = read_metrics(RunLayout(folder).validation, STEPS + 1)
    return [[round(loss, 5) for loss in line[BY_IMAGE]] for line in lines]


def _log(text: str) -> None:
    print(text, flush=True)


def truth(artist: Artist, loras: Sequence[Path], file: Path) -> list[list[int]]:
    """Return the numbers of right pictures and of all pictures of the concept, for each LoRA.

    Each LoRA gets a few pictures; only those that may be the best get all of them. `file` holds the result of
    an earlier call.
    """
    if file.is_file():
        return json.loads(file.read_text("utf-8"))
    right = [_right(artist, lora, range(FIRST_TRUE)) for lora in loras]
    few = FIRST_TRUE * len(concept_pictures())
    limit = max(right) - _NEARLY * few
    result = [
        [first + _right(artist, lora, range(FIRST_TRUE, TRUE)), TRUE * len(concept_pictures())]
        if first >= limit
        else [first, few]
        for first, lora in zip(right, loras, strict=True)
    ]
    file.write_text(json.dumps(result), encoding="utf-8")
    return result


def _right(artist: Artist, lora: Path, numbers: range) -> int:
    loaded = artist.load(lora / layout_file("diffusers", ""))
    wanted = [each.scene for each in concept_pictures() for _ in numbers]
    prompts = [
        (each.caption, _FIRST_TRUE_SEED + index * _SEEDS_PER_PROMPT + number)
        for index, each in enumerate(concept_pictures())
        for number in numbers
    ]
    return round(score(artist.draw(loaded, prompts), wanted).all_three * len(wanted))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of the cache and of the runs")
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds in all")
    arguments = parser.parse_args()

    missing = set(range(1, arguments.seeds + 1)) - {line["seed"] for line in read_lines(RESULTS)}
    if missing:
        add_seeds(sorted(missing), arguments.folder.absolute(), RESULTS)
    print(report(read_lines(RESULTS)))


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
        fill_cache(recipe)
        line = measure(recipe, ForkedLaunch(recipe.accelerate), artist)
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
