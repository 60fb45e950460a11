"""The study of what a training shows about its images, and of what removing the found ones changes.

    python -m demo.defects_trained outputs/trained            # the missing trainings; stop it at any time
    python -m demo.defects_trained outputs/trained --seeds 0  # the tables of the stored results

A seed has three trainings on the datasets of `demo.defects`: `planted` with the four defects, `repaired` with
them but without the images that diagnosis and checks found, and `clean` without the defects. The results are
in demo/results/defects_trained.jsonl, one line per seed and training.

`planted` is shorter than the others, which have the demo's own number of steps: its score is not compared.
Two lists of images come from its losses: the hardest images, and those that Fizgig 7.2 would watch. By its
description, their loss, relative to all losses at similar noise, stays high and does not fall.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING

import polars as pl

from demo.cached_dataset import dataset, in_process
from demo.concept_pictures import concept_scenes
from demo.defects import RESULTS as FOUND
from demo.defects import TOP, nothing, plant_with, top
from demo.drawing import draw_seeded
from demo.learned import load_pipeline
from demo.score import score
from demo.stored_results import Result, add_result, read_results
from pipeline.log import discard
from pipeline.recipe import in_project
from pipeline.recipe.project import project_root
from pipeline.storage.tables import Tables
from pipeline.trained_lora.export.lora_files import LORA_FOLDER
from pipeline.trained_lora.inputs import read_inputs
from pipeline.trained_lora.job import INPUTS_FILE
from pipeline.trained_lora.run_folder import RunLayout, read_metrics
from pipeline.trained_lora.stage import train_lora

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

RESULTS = project_root() / "demo" / "results" / "defects_trained.jsonl"

STEPS = {"planted": 150, "clean": 400, "repaired": 400}
"""Steps of each training; 150 are 25 draws of each image."""

PARTS = tuple(STEPS)

SCORED = ("clean", "repaired")
"""The trainings with a score."""

KINDS = ("caption", "shape", "blurred")

NUM_DRAWINGS = 4
"""Number of pictures of each prompt of the concept that the score counts."""

NUM_BINS = 20
"""Number of groups of similar noise levels."""


def trained(folder: Path, cache: Path, seed: int, part: str, found: Sequence[str]) -> Result:
    """Train on one of the datasets of a seed, and return the concept's score and perhaps the lists.

    `found` are the images that `repaired` does not have.
    """
    change = nothing if part == "clean" else plant_with(seed)
    removed = found if part == "repaired" else ()
    steps = STEPS[part]
    training = {"steps": steps, "checkpoint_every": steps, "sample_every": 0, "trackers": []}
    recipe, _ = dataset(folder, cache, seed, change, without=removed, training=training)
    tables = Tables(recipe.output_dir)
    latents, text = tables.read("vae_latents"), tables.read("text_embeddings")
    report = train_lora(recipe, latents, text, launch=in_process, log=discard).report

    result: Result = {}
    if part in SCORED:
        result["score"] = concept_score(recipe)
    else:
        result["hardest"] = [Path(each["sample_id"]).stem for each in report["hardest_samples"][:TOP]]
        layout = RunLayout(recipe.output_dir / "runs" / report["run"])
        trained_on = read_inputs(layout.folder / INPUTS_FILE).trained.table["sample_id"]
        names = [Path(each).stem for each in trained_on]
        result["watched"] = watched(layout.sample_losses, report["steps"], names)
    return result


def concept_score(recipe: Recipe) -> float:
    """Return the fraction of pictures of the concept with the right shape, colour and background."""
    pipeline = load_pipeline(in_project(recipe.model.base))
    pipeline.load_lora_weights(str(recipe.output_dir / LORA_FOLDER))
    scenes = concept_scenes() * NUM_DRAWINGS
    prompts = [(scene.caption, number) for number, scene in enumerate(scenes)]
    return score(draw_seeded(pipeline, prompts), scenes).all_three


def watched(losses: Path, num_steps: int, names: Sequence[str]) -> list[str]:
    """Return the `TOP` images with the highest residual among those with a residual that does not fall.

    `losses` is a run's file of sample losses, which has indices of `names`.
    """
    draws = pl.DataFrame(
        [
            {"image": image, "step": line["step"], "timestep": timestep, "loss": loss}
            for line in read_metrics(losses, num_steps)
            for image, timestep, loss in zip(line["samples"], line["timesteps"], line["losses"], strict=True)
        ]
    )
    group = pl.col("timestep").rank("ordinal") * NUM_BINS // (pl.len() + 1)
    draws = draws.with_columns(residual=pl.col("loss") - pl.col("loss").mean().over(group))
    step = pl.col("step") - pl.col("step").mean()
    images = draws.group_by("image").agg(pl.col("residual").mean(), slope=(step * pl.col("residual")).sum())
    stuck = images.filter(pl.col("slope") >= 0).sort("residual", descending=True).head(TOP)
    return [names[int(image)] for image in stuck["image"]]


def report(found: Iterable[Result], results: Iterable[Result]) -> Iterator[str]:
    """Yield the tables of docs/diagnosis.md as Markdown."""
    parts: dict[str, dict[int, Result]] = {part: {} for part in PARTS}
    for each in results:
        parts[each["part"]][each["seed"]] = each
    planted = [(each, parts["planted"][each["seed"]]) for each in found if each["seed"] in parts["planted"]]

    yield f"| the first six of | {' | '.join(KINDS)} | other images |"
    yield "|---" * (2 + len(KINDS)) + "|"
    for name in ("diagnosis and checks", "hardest", "watched"):
        first_six = [
            (each["planted"], top(each) if name == "diagnosis and checks" else lists[name])
            for each, lists in planted
        ]
        cells = [
            f"{sum(kinds.get(image) == kind for kinds, six in first_six for image in six)} of "
            f"{sum(list(kinds.values()).count(kind) for kinds, _ in first_six)}"
            for kind in KINDS
        ]
        others = sum(image not in kinds for kinds, six in first_six for image in six)
        yield f"| {name} | {' | '.join(cells)} | {others} |"

    clean, repaired = (parts[part] for part in SCORED)
    pairs = [
        (seed, clean[seed]["score"], repaired[seed]["score"]) for seed in sorted(clean.keys() & repaired)
    ]
    yield ""
    yield "| seed | clean | repaired |"
    yield "|---" * 3 + "|"
    for seed, *scores in pairs:
        yield f"| {seed} | {' | '.join(f'{score:.2f}' for score in scores)} |"
    if len(pairs) > 1:
        lower = [before - after for _, before, after in pairs]
        means = (mean(each[1] for each in pairs), mean(each[2] for each in pairs))
        yield f"| mean | {' | '.join(f'{each:.3f}' for each in means)} |"
        yield ""
        error = stdev(lower) / len(lower) ** 0.5
        yield f"repaired: {mean(lower):.3f} lower than clean, standard error {error:.3f}"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of the cache and of the dataset in work")
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds; stored ones are skipped")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    arguments = parser.parse_args()
    found = {each["seed"]: each for each in read_results(FOUND)}
    stored = {(each["part"], each["seed"]) for each in read_results(RESULTS)}
    for seed in range(arguments.seeds):
        for part in arguments.parts:
            if (part, seed) not in stored:
                _add(arguments.folder.absolute(), part, seed, top(found[seed]))
    print("\n".join(report(found.values(), read_results(RESULTS))))


def _add(folder: Path, part: str, seed: int, found: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        result = trained(Path(own), folder / "cache", seed, part, found)
    add_result(RESULTS, {"part": part, "seed": seed, **result})


if __name__ == "__main__":
    main()
