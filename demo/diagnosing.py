"""The study of the caption swap: does it find wrong captions that are planted in the demo's dataset?

    python -m demo.diagnosing outputs/diagnosing 10    # figures of docs/diagnosis.md, in some minutes

Each seed draws other pictures and chooses other captions to exchange. Its clean dataset shows false alarms.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from demo.concept_pictures import write_pictures
from demo.experiments import changed_demo
from pipeline.diagnosis.stage import diagnose
from pipeline.log import Log, discard
from pipeline.storage.tables import Tables

if TYPE_CHECKING:
    from pipeline.processes.launch import Launch
    from pipeline.recipe import Recipe
    from pipeline.reporting.reports import Report

FORWARD_PASSES_PER_SAMPLE = 3
"""Forward passes that take as long as training on one sample: the backward pass takes about two."""

NUM_WRONG = 4
"""Number of captions that are exchanged with one another."""


@dataclass(frozen=True)
class Trial:
    """Diagnosis of one dataset.

    Attributes:
        table: Table of the diagnosis.
        wrong: Samples with planted captions.
    """

    table: pl.DataFrame
    report: Report
    wrong: frozenset[str]

    @property
    def found(self) -> frozenset[str]:
        """Samples whose captions do not fit."""
        return frozenset(self.table.filter(verdict="does not fit")["sample_id"])

    @property
    def auc(self) -> float:
        """Probability that a wrong caption has a higher score than a right one."""
        is_wrong = pl.col("sample_id").is_in(list(self.wrong))
        wrong, right = self.table.filter(is_wrong)["score"], self.table.filter(~is_wrong)["score"]
        pairs = [(high > low) + (high == low) / 2 for high in wrong for low in right]
        return sum(pairs) / len(pairs)

    @property
    def epochs(self) -> float:
        """Cost in epochs of training, each with a forward and a backward pass of every sample."""
        return self.report["passes"] / (FORWARD_PASSES_PER_SAMPLE * self.report["samples"])


def trial(
    folder: Path, cache: Path, seed: int, launch: Launch, *, num_wrong: int, log: Log = discard
) -> Trial:
    """Draw the demo's dataset in an empty folder, exchange captions, and diagnose it."""
    from assets.definitions import build_definitions

    pictures = folder / "pictures"
    write_pictures(pictures, seed)
    wrong = exchange_captions(pictures, num_wrong, seed)
    recipe = changed_demo(
        folder,
        cache_dir=str(cache),
        # Pictures of one world resemble each other more than photographs.
        checks={"near_duplicate_bits": 0},
        diagnosis={"captions": True},
    )
    build_definitions([recipe]).resolve_job_def(f"{recipe.name}_cache").execute_in_process()
    return diagnosed(recipe, wrong, launch, log=log)


def diagnosed(recipe: Recipe, wrong: frozenset[str], launch: Launch, *, log: Log = discard) -> Trial:
    """Diagnose a recipe with complete caches."""
    tables = Tables(recipe.output_dir)
    latents, text = tables.read("vae_latents"), tables.read("text_embeddings")
    result = diagnose(recipe, latents, text, tables, launch=launch, log=log)
    return Trial(result.table, result.report, wrong)


def exchange_captions(pictures: Path, number: int, seed: int) -> frozenset[str]:
    """Give each of some pictures the caption of the next one, and return the samples."""
    files = random.Random(seed).sample(sorted(pictures.rglob("*.txt")), number)
    captions = [file.read_text("utf-8") for file in files]
    for file, caption in zip(files, captions[1:] + captions[:1], strict=True):
        file.write_text(caption, encoding="utf-8")
    return frozenset(file.relative_to(pictures).with_suffix(".png").as_posix() for file in files)


def report(planted: Sequence[Trial], clean: Sequence[Trial]) -> str:
    """Return a table of the trials as Markdown."""
    lines = [
        "| seed | AUC | found | false alarms | on the clean dataset | undecided | epochs |",
        "|---" * 7 + "|",
    ]
    for seed, (each, without) in enumerate(zip(planted, clean, strict=True)):
        lines.append(
            f"| {seed} | {each.auc:.3f} | {len(each.found & each.wrong)} of {len(each.wrong)} | "
            f"{len(each.found - each.wrong)} | {len(without.found)} | {each.report['cannot_tell']} | "
            f"{each.epochs:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the command."""
    from pipeline.processes.launch import LocalLaunch
    from pipeline.recipe import AccelerateSettings

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="new folder of the datasets and their cache")
    parser.add_argument("seeds", type=int, help="number of seeds")
    arguments = parser.parse_args()

    folder: Path = arguments.folder.absolute()
    launch = LocalLaunch(AccelerateSettings())
    planted: list[Trial] = []
    clean: list[Trial] = []
    for seed in range(arguments.seeds):
        for trials, num_wrong in ((clean, 0), (planted, NUM_WRONG)):
            own = folder / f"seed_{seed}_{num_wrong}"
            own.mkdir(parents=True)
            trials.append(trial(own, folder / "cache", seed, launch, num_wrong=num_wrong))
    print(report(planted, clean))


if __name__ == "__main__":
    main()
