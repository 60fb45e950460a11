"""The study of influence: its estimate for each image against a training without the image.

    python -m demo.influence outputs/influence            # three seeds, some minutes each
    python -m demo.influence outputs/influence --seeds 0  # the tables of the stored results

The 24 pictures of the concept are trained on, four of them with exchanged captions, and 24 others of the
concept are held out. From an early step on, the training is repeated once without each picture. The results
are in demo/results/influence.jsonl, one line per seed.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy.stats import spearmanr

from demo.cached_dataset import dataset, training_job
from demo.concept_pictures import concept_scenes
from demo.diagnosing import exchange_captions
from demo.stored_results import Result, run_study
from demo.world import draw_scene
from pipeline.diagnosis.influence import estimated_changes, paired_change
from pipeline.diagnosis.worker.influence import Influences, product
from pipeline.models.worker.family import load_family
from pipeline.recipe.project import project_root
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.worker.engine import Engine
from pipeline.trained_lora.worker.loader import MicroBatchMaker, micro_inputs
from pipeline.trained_lora.worker.validation import Validation

RESULTS = project_root() / "demo" / "results" / "influence.jsonl"

NUM_WRONG = 4

STEPS = 60
"""Steps of batches of four: ten epochs."""

SAVED = (12, 24, 36, 48)
"""Steps at which gradients are computed. The trainings without a picture begin at the first one."""

NUM_LEFT_OUT = 3
"""Number of pictures that are left out together."""

_TRAINING = {
    "steps": STEPS,
    "batch_size": 4,
    "warmup_steps": 5,
    "sample_every": 0,
    "trackers": [],
    # The held-out loss is measured with cached captions.
    "lora": {"text_encoders": None},
}
"""Changes of the demo's training."""

_HELD_OUT = "known"
"""Dataset with the held-out pictures, in place of its own."""


def influence_job(folder: Path, cache: Path, seed: int) -> tuple[TrainingJob, frozenset[str]]:
    """Return the job of a training on the concept, and the samples with a wrong caption."""
    wrong = frozenset[str]()

    def change(pictures: Path) -> dict[str, str]:
        nonlocal wrong
        _draw_held_out(pictures / _HELD_OUT, seed)
        wrong = frozenset(
            f"concept/{each}" for each in exchange_captions(pictures / "concept", NUM_WRONG, seed)
        )
        return {}

    recipe, _ = dataset(folder, cache, seed, change, training={**_TRAINING, "seed": seed})
    return training_job(recipe, held_out=_HELD_OUT), wrong


def _draw_held_out(folder: Path, seed: int) -> None:
    for file in folder.iterdir():
        file.unlink()
    random = np.random.default_rng([seed, 1])
    for scene in concept_scenes():
        name = folder / f"{scene.colour}_{scene.background}"
        Image.fromarray(draw_scene(scene, random)).save(name.with_suffix(".png"))
        name.with_suffix(".txt").write_text(scene.caption, encoding="utf-8")


class Trainings:
    """Trainings of one job without some of its pictures."""

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        self.family = load_family(job.base)
        self.engine = Engine(job, self.family)
        self._maker = MicroBatchMaker(job, self.family, self.engine.noise_scheduler)
        self._validation = Validation(job, self.family, job.inputs.held_out)
        self.states = {0: copy.deepcopy(self.engine.state(0))}
        self.rates: dict[int, float] = {}

    def losses(self, start: int, without: Collection[str] = (), save: Collection[int] = ()) -> list[float]:
        """Train from a saved step to the end, and return the loss of each held-out picture."""
        self.engine.restore(copy.deepcopy(self.states[start]))
        plan = replace(self.job, left_out=frozenset(without)).plan()
        inputs = micro_inputs(plan, self._maker, rank=0, start=start, pin=False)
        for number, batch in plan.iterate(start):
            self.rates[number] = self.engine.step(batch, inputs, stop=False).learning_rate
            if number + 1 in save:
                self.states[number + 1] = copy.deepcopy(self.engine.state(number + 1))
        return list(self._validation.loss(self.engine).by_variant.values())

    def estimates(self) -> dict[str, dict[str, float]]:
        """Return the estimated change of the held-out loss without each picture, by kind of estimate."""
        influences = Influences(self.job, self.family, self.engine)
        values: dict[str, dict[tuple[str, int], float]] = {"adam": {}, "plain": {}}
        names: list[str] = self.job.inputs.trained.table["variant_id"].to_list()
        for step in SAVED:
            influences.restore(copy.deepcopy(self.states[step]))
            for name in names:
                gradient = influences.gradient(name)
                values["adam"][name, step] = product(gradient, influences.direction)
                values["plain"][name, step] = product(gradient, influences.held_out)
        return {kind: estimated_changes(self.job, each, self.rates, SAVED) for kind, each in values.items()}


def trial(folder: Path, cache: Path, seed: int) -> Result:
    """Return the change of the held-out loss without each picture, and its estimates."""
    torch.set_num_threads(1)
    job, wrong = influence_job(folder, cache, seed)
    trainings = Trainings(job)
    names: list[str] = job.inputs.trained.table["variant_id"].to_list()
    complete = trainings.losses(0, save=SAVED)
    # A training without nothing is the training itself, bit for bit.
    assert trainings.losses(SAVED[0]) == complete
    estimates = trainings.estimates()
    without = {name: trainings.losses(SAVED[0], [name]) for name in names}

    ranked = sorted(names, key=lambda name: estimates["adam"][name])
    middle = (len(ranked) - NUM_LEFT_OUT) // 2
    groups = {
        "worst": ranked[:NUM_LEFT_OUT],
        "middle": ranked[middle : middle + NUM_LEFT_OUT],
        "wrong": sorted(wrong),
    }
    changes = {name: _change(complete, trainings.losses(SAVED[0], group)) for name, group in groups.items()}
    return {
        "loss": mean(complete),
        "images": names,
        "wrong": sorted(wrong),
        "without_each": [_change(complete, without[name])[0] for name in names],
        **{kind: [each[name] / mean(complete) for name in names] for kind, each in estimates.items()},
        "groups": groups,
        "changes": changes,
    }


def _change(before: list[float], after: list[float]) -> tuple[float, float, float]:
    change = paired_change(np.array(before), np.array(after))
    return change.change, change.low, change.high


def report(results: Iterable[Result]) -> Iterator[str]:
    """Yield the tables of docs/diagnosis.md as Markdown."""
    results = list(results)
    yield "| seed | rank correlation | without Adam's moments | wrong captions among the worst 4 |"
    yield "|---" * 4 + "|"
    correlations = {kind: [_correlation(each, kind) for each in results] for kind in ("adam", "plain")}
    for each, adam, plain in zip(results, *correlations.values(), strict=True):
        ranked = sorted(zip(each["adam"], each["images"], strict=True))
        found = {name for _, name in ranked[: len(each["wrong"])]} & set(each["wrong"])
        yield f"| {each['seed']} | {adam:.2f} | {plain:.2f} | {len(found)} of {len(each['wrong'])} |"
    if len(results) > 1:
        yield f"| mean | {mean(correlations['adam']):.2f} | {mean(correlations['plain']):.2f} | |"

    yield ""
    yield "| seed | without the worst 3 | without 3 from the middle | without the 4 wrong captions |"
    yield "|---" * 4 + "|"
    for each in results:
        cells = (_text(*each["changes"][name]) for name in ("worst", "middle", "wrong"))
        yield f"| {each['seed']} | {' | '.join(cells)} |"

    between = [_rank_correlation(left, right) for left, right in combinations(_by_scene(results), 2)]
    if between:
        yield ""
        yield f"the true changes of two seeds have a mean rank correlation of {mean(between):.2f}"


def _correlation(result: Result, kind: str) -> float:
    return _rank_correlation(result[kind], result["without_each"])


def _rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    correlation: Any = spearmanr(left, right)
    return float(correlation.statistic)


def _by_scene(results: Iterable[Result]) -> Iterator[list[float]]:
    for each in results:
        changes: list[Any] = sorted(zip(each["images"], each["without_each"], strict=True))
        yield [change for _, change in changes]


def _text(change: float, low: float, high: float) -> str:
    return f"{100 * change:+.1f}% ({100 * low:+.1f} to {100 * high:+.1f})"


if __name__ == "__main__":
    run_study(__doc__, RESULTS, trial, report, seeds=3)
