"""The study of what a training shows about its images, by planted defects.

    python -m demo.defects_trained outputs/trained            # the missing trainings; stop it at any time
    python -m demo.defects_trained outputs/trained --seeds 0  # the table of the stored results

Each seed trains on its dataset of `demo.defects` with the four defects. Two lists of images come from the
losses: the hardest images, and those that Fizgig 7.2 would watch. By its description, their loss, relative to
all losses at similar noise, stays high and does not fall. The results are in
demo/results/defects_trained.jsonl, one line per seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import polars as pl

from demo.cached_dataset import dataset, in_process
from demo.defects import RESULTS as FOUND
from demo.defects import TOP, plant_with, top
from demo.stored_results import Result, read_results, run_study
from pipeline.log import discard
from pipeline.recipe.project import project_root
from pipeline.storage.tables import Tables
from pipeline.trained_lora.inputs import read_inputs
from pipeline.trained_lora.job import INPUTS_FILE
from pipeline.trained_lora.run_folder import RunLayout, read_metrics
from pipeline.trained_lora.stage import train_lora

RESULTS = project_root() / "demo" / "results" / "defects_trained.jsonl"

STEPS = 150
"""Steps of each training: 25 draws of each image."""

KINDS = ("caption", "shape", "blurred")

NUM_BINS = 20
"""Number of groups of similar noise levels."""


def trained(folder: Path, cache: Path, seed: int) -> Result:
    """Train on the dataset of a seed, and return the lists of images."""
    training = {"steps": STEPS, "checkpoint_every": STEPS, "sample_every": 0, "trackers": []}
    recipe, _ = dataset(folder, cache, seed, plant_with(seed), training=training)
    tables = Tables(recipe.output_dir)
    latents, text = tables.read("vae_latents"), tables.read("text_embeddings")
    report = train_lora(recipe, latents, text, launch=in_process, log=discard).report

    layout = RunLayout(recipe.output_dir / "runs" / report["run"])
    trained_on = read_inputs(layout.folder / INPUTS_FILE).trained.table["sample_id"]
    names = [Path(each).stem for each in trained_on]
    return {
        "hardest": [Path(each["sample_id"]).stem for each in report["hardest_samples"][:TOP]],
        "watched": watched(layout.sample_losses, report["steps"], names),
    }


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
    """Yield the table of docs/diagnosis.md as Markdown."""
    by_seed = {each["seed"]: each for each in results}
    planted = [(each, by_seed[each["seed"]]) for each in found if each["seed"] in by_seed]

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


if __name__ == "__main__":
    run_study(__doc__, RESULTS, trained, partial(report, read_results(FOUND)))
