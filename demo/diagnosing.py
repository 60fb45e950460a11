"""The study of the caption swap: does it find wrong captions that are planted in the demo's dataset?

    python -m demo.diagnosing outputs/diagnosing            # ten seeds, a minute each; stop it at any time
    python -m demo.diagnosing outputs/diagnosing --seeds 0  # the table of the stored results

Each seed draws other pictures and chooses other captions to exchange. Its clean dataset shows false alarms.
The results are in demo/results/diagnosing.jsonl, one line per seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from demo.cached_dataset import dataset, in_process
from demo.stored_results import Result, run_study
from pipeline.diagnosis.stage import diagnose
from pipeline.log import discard
from pipeline.recipe.project import project_root
from pipeline.storage.tables import Tables

if TYPE_CHECKING:
    from pipeline.recipe import Recipe
    from pipeline.reporting.reports import Report

RESULTS = project_root() / "demo" / "results" / "diagnosing.jsonl"

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


def trial(folder: Path, cache: Path, seed: int, *, num_wrong: int, **sections: Any) -> Trial:
    """Draw the demo's dataset in an empty folder, exchange captions, and diagnose it.

    `sections` are changes of the demo's recipe.
    """
    wrong = frozenset[str]()

    def change(pictures: Path) -> dict[str, str]:
        nonlocal wrong
        wrong = exchange_captions(pictures, num_wrong, seed)
        return {}

    recipe, _ = dataset(folder, cache, seed, change, **sections)
    return diagnosed(recipe, wrong)


def diagnosed(recipe: Recipe, wrong: frozenset[str]) -> Trial:
    """Diagnose a recipe with complete caches."""
    tables = Tables(recipe.output_dir)
    latents, text = tables.read("vae_latents"), tables.read("text_embeddings")
    result = diagnose(recipe, latents, text, tables, launch=in_process, log=discard)
    return Trial(result.table, result.report, wrong)


def exchange_captions(pictures: Path, number: int, seed: int) -> frozenset[str]:
    """Give each of some pictures the caption of the next one, and return the samples."""
    files = random.Random(seed).sample(sorted(pictures.rglob("*.txt")), number)
    captions = [file.read_text("utf-8") for file in files]
    for file, caption in zip(files, captions[1:] + captions[:1], strict=True):
        file.write_text(caption, encoding="utf-8")
    return frozenset(file.relative_to(pictures).with_suffix(".png").as_posix() for file in files)


def figures(folder: Path, cache: Path, seed: int, **sections: Any) -> Result:
    """Return the figures of a seed, with exchanged captions and without; see `trial`."""
    trials: list[Trial] = []
    for number in (NUM_WRONG, 0):
        own = folder / f"{number}"
        own.mkdir()
        trials.append(trial(own, cache, seed, num_wrong=number, **sections))
    return results_of(*trials)


def results_of(planted: Trial, clean: Trial) -> Result:
    """Return the figures of a seed, from its diagnosis with exchanged captions and the one without."""
    return {
        "auc": planted.auc,
        "wrong": len(planted.wrong),
        "found": len(planted.found & planted.wrong),
        "alarms": len(planted.found - planted.wrong),
        "clean_alarms": len(clean.found),
        "undecided": planted.report["cannot_tell"],
        "epochs": planted.epochs,
    }


def report(results: Iterable[Result]) -> Iterator[str]:
    """Yield the table of docs/diagnosis.md as Markdown."""
    yield "| seed | AUC | found | false alarms | false alarms without exchange | undecided | cost in epochs |"
    yield "|---" * 7 + "|"
    for each in results:
        cells = (
            each["seed"],
            f"{each['auc']:.3f}",
            f"{each['found']} of {each['wrong']}",
            each["alarms"],
            each["clean_alarms"],
            each["undecided"],
            f"{each['epochs']:.1f}",
        )
        yield f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    run_study(__doc__, RESULTS, figures, report)
