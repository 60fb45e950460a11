"""The study of what removing the found images changes: trainings with, without, and of the clean dataset.

    OMP_NUM_THREADS=1 python -m demo.defects_removed outputs/removed   # ten seeds, two minutes each
    python -m demo.defects_removed outputs/removed --seeds 0           # the table of the stored results

The concept is that of `demo.new_name`, and the defects are those of `demo.defects`. The images that a person
would look at first are removed: they keep their places in the training with weight 0, so that all other
images have the same order and noise in the three trainings of a seed. The results are in
demo/results/defects_removed.jsonl, one line per seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import mean, stdev

from demo.choosing.datasets import NAME, SHAPE
from demo.defects import named_images, nothing, plant, top
from demo.new_name import concept_score, new_name_job, teach
from demo.stored_results import Result, run_study
from pipeline.recipe.project import project_root

RESULTS = project_root() / "demo" / "results" / "defects_removed.jsonl"

TRAININGS = ("clean", "planted", "repaired")
"""Trainings on the dataset without the defects, with them, and with them but without the found images."""


def trial(folder: Path, cache: Path, seed: int) -> Result:
    """Return the planted defects of a seed, the images that were found, and the scores of the trainings."""
    clean, _ = new_name_job(folder / "clean", cache, seed, nothing)
    planted, kinds = new_name_job(
        folder / "planted", cache, seed, lambda pictures: plant(pictures, seed, names={NAME: SHAPE})
    )
    named = named_images(planted.recipe)
    adapters = {
        "clean": teach(clean),
        "planted": teach(planted),
        "repaired": teach(planted, without=top(named)),
    }
    scores = {name: concept_score(clean.base, adapter, seed) for name, adapter in adapters.items()}
    return {"planted": kinds, **named, "scores": scores}


def report(results: Iterable[Result]) -> Iterator[str]:
    """Yield the table of docs/diagnosis.md as Markdown, and the mean differences from the clean runs."""
    results = list(results)
    yield f"| seed | removed defects | removed other images | {' | '.join(TRAININGS)} |"
    yield "|---" * (3 + len(TRAININGS)) + "|"
    for each in results:
        removed, planted = set(top(each)), each["planted"].keys()
        scores = " | ".join(f"{each['scores'][name]:.3f}" for name in TRAININGS)
        found = f"{len(removed & planted)} of {len(planted)}"
        yield f"| {each['seed']} | {found} | {len(removed - planted)} | {scores} |"
    if len(results) < 2:
        return
    means = (f"{mean(each['scores'][name] for each in results):.3f}" for name in TRAININGS)
    yield f"| mean | | | {' | '.join(means)} |"
    yield ""
    for name in ("planted", "repaired"):
        lower = [each["scores"]["clean"] - each["scores"][name] for each in results]
        error = stdev(lower) / len(lower) ** 0.5
        yield f"{name}: {mean(lower):.3f} lower than clean, standard error {error:.3f}"


if __name__ == "__main__":
    run_study(__doc__, RESULTS, trial, report)
