"""One run of the study: training by the recipe's job, and pictures of every step with their scores."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from PIL import Image

from demo.choosing.datasets import CONCEPT, HELD_OUT, KNOWN, Picture, StudyDataset, study_datasets
from demo.concept_pictures import concept_scenes
from demo.drawing import draw_seeded
from demo.experiments import changed_demo
from demo.learned import known_prompts
from demo.pixel_statistics import PixelScorer
from demo.score import WorldScorer, score
from demo.world import SHAPES, scenes
from pipeline.evaluation.features import References, ScorerFeatures
from pipeline.evaluation.numbers import NUMBERS, measure
from pipeline.trained_lora.export.lora_files import layout_file
from pipeline.trained_lora.run_folder import RunLayout, lora_steps, read_metrics

if TYPE_CHECKING:
    from demo.world import Array
    from pipeline.recipe import Recipe

STEPS, SAVE_EVERY = 320, 40

# Twelve steps draw a little better and take twice the time, most of a run's.
_DENOISING_STEPS = 6

LEARNING_RATES = (5e-3, 1.2e-2, 2e-3)
"""A rate that suits the demo, one that is too high, and one that is too low."""

SEEDS = (1, 2)

SCORERS: Mapping[str, Any] = {"world": WorldScorer(), "pixels": PixelScorer()}
"""Scorers by their name in the results."""

_EVALUATION_SEEDS, _CONCEPT_SEEDS, _KNOWN_SEEDS = range(4), range(1000, 1003), range(1000, 1001)
"""Seeds of pictures. The evaluation and the truth share none."""

_BASE_PROMPTS = scenes(*SHAPES)[1::20]
"""Known shapes on which drift is measured; the truth draws others."""

_ALMOST_ALL = 0.999999
"""`validation_fraction` of the dataset that is held out; 1 is not allowed."""

Result = dict[str, Any]


@dataclass(frozen=True)
class StudyRun:
    """Settings of one run."""

    dataset: str
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        """Name of the run in the results."""
        return f"{self.dataset}, {self.learning_rate:g}, seed {self.seed}"


def study_runs() -> list[StudyRun]:
    """Return all runs; the first fifteen have every dataset and learning rate once."""
    return [
        StudyRun(dataset, rate, seed)
        for seed, rate, dataset in itertools.product(SEEDS, LEARNING_RATES, study_datasets())
    ]


def train(
    run: StudyRun,
    dataset: StudyDataset,
    folder: Path,
    cache: Path,
    *,
    steps: int = STEPS,
    save_every: int = SAVE_EVERY,
) -> Recipe:
    """Train the run in an empty folder by the recipe's job, and return its recipe."""
    from assets.definitions import build_definitions

    dataset.write(folder / "study")
    names = [CONCEPT, HELD_OUT, *([KNOWN] if dataset.known else [])]
    recipe = changed_demo(
        folder,
        datasets=[
            {
                "name": name,
                "path": str(folder / "study" / name),
                "captions": {"from": "sidecar", "suffix": ".txt"},
                "validation_fraction": _ALMOST_ALL if name == HELD_OUT else 0.0,
            }
            for name in names
        ],
        cache_dir=str(cache),
        # Pictures of one world resemble each other more than photographs.
        checks={"near_duplicate_bits": 0},
        accelerate={"cpu_threads": 1},
        training={
            "steps": steps,
            "learning_rate": run.learning_rate,
            "lr_scheduler": "constant",
            "seed": run.seed,
            "checkpoint_every": save_every,
            "validate_every": save_every,
            "sample_every": 0,
            "trackers": [],
        },
    )
    build_definitions([recipe]).resolve_job_def(f"{recipe.name}_train").execute_in_process()
    return recipe


class Artist:
    """Draws with the base model, and with LoRAs merged into copies of it."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._without_lora: dict[tuple[str, int], Array] = {}

    def draw(self, lora: Path | None, prompts: Sequence[tuple[str, int]]) -> list[Array]:
        """Return a picture for each prompt and seed; pictures without a LoRA are drawn once."""
        if lora is not None:
            return draw_seeded(with_lora(self._pipeline, lora), prompts, num_steps=_DENOISING_STEPS)
        missing = [each for each in dict.fromkeys(prompts) if each not in self._without_lora]
        drawn = draw_seeded(self._pipeline, missing, num_steps=_DENOISING_STEPS)
        self._without_lora |= dict(zip(missing, drawn, strict=True))
        return [self._without_lora[each] for each in prompts]


def with_lora(pipeline: Any, file: Path) -> Any:
    """Return a copy of the pipeline with a LoRA merged into its weights, which draws faster."""
    model = copy.deepcopy(pipeline)
    model.load_lora_weights(str(file))
    model.fuse_lora(components=["unet", "text_encoder"])
    model.unload_lora_weights()
    return model


def results(run: StudyRun, dataset: StudyDataset, recipe: Recipe, artist: Artist) -> list[Result]:
    """Draw with the base model and with every step of a run, and return one result per step."""
    (folder,) = (recipe.output_dir / "runs").iterdir()
    layout = RunLayout(folder)
    files = {step: each / layout_file("diffusers", "") for step, each in lora_steps(layout).items()}
    losses = {line["step"]: line["loss"] for line in read_metrics(layout.validation, max(files) + 1)}

    concept = [(scene, seed) for scene in concept_scenes() for seed in _CONCEPT_SEEDS]
    known = [(scene, seed) for scene in known_prompts() for seed in _KNOWN_SEEDS]
    truth, cells = [*concept, *known], evaluation_cells(dataset)
    prompts = [(scene.caption, seed) for scene, seed in truth] + [cell[1:] for cell in cells]
    drawn: list[tuple[int, str, str, int, Array]] = []
    lines: list[Result] = []
    for step, file in {0: None, **files}.items():
        pictures = artist.draw(file, prompts)
        scored = [
            score([picture], [scene]).all_three
            for picture, (scene, _) in zip(pictures[: len(truth)], truth, strict=True)
        ]
        lines.append(
            {
                "run": run.name,
                "step": step,
                "concept": _mean(scored[: len(concept)]),
                "known": _mean(scored[len(concept) :]),
                "validation_loss": losses.get(step),
            }
        )
        evaluated = zip(cells, pictures[len(truth) :], strict=True)
        drawn += [(step, *cell, picture) for cell, picture in evaluated]

    for name, scorer in SCORERS.items():
        table = measure([_features(name, scorer, dataset, drawn, folder=recipe.source.parents[1])]).scores
        for line in lines[1:]:
            line[name] = _grids(table.filter(step=line["step"]))
    return lines


def evaluation_cells(dataset: StudyDataset) -> list[tuple[str, str, int]]:
    """Return role, prompt and seed of each picture of the evaluation."""
    concept = dict.fromkeys(each.caption for each in dataset.held_out)
    prompts = [*(("concept", each) for each in concept), *(("base", each.caption) for each in _BASE_PROMPTS)]
    return [(role, prompt, seed) for role, prompt in prompts for seed in _EVALUATION_SEEDS]


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 4)


def _features(
    name: str,
    scorer: Any,
    dataset: StudyDataset,
    drawn: Sequence[tuple[int, str, str, int, Array]],
    *,
    folder: Path,
) -> ScorerFeatures:
    def references(part: str, pictures: Sequence[Picture]) -> References:
        files = sorted((folder / "study" / part).glob("*.png"))
        names = [f"{part}/{file.name}" for file in files]
        captions = [each.caption for each in pictures]
        features = scorer.picture_features([Image.open(file) for file in files])
        return References(["zorp"] * len(files), names, captions, names, features)

    rows = [
        {
            "step": step,
            "strength": 1.0 if step else 0.0,
            "prompt": prompt,
            "role": role,
            "concept": "zorp" if role == "concept" else "",
            "seed": seed,
            "row": row,
            "picture": "",
        }
        for row, (step, role, prompt, seed, _) in enumerate(drawn)
    ]
    prompts = sorted({prompt for _, _, prompt, _, _ in drawn})
    texts = dict(zip(prompts, scorer.text_features(prompts), strict=True)) if scorer.reads_texts else None
    return ScorerFeatures(
        scorer=name,
        pictures=pl.DataFrame(rows),
        features=scorer.picture_features([Image.fromarray(picture) for *_, picture in drawn]),
        texts=texts,
        held_out=references(HELD_OUT, dataset.held_out),
        training=references(CONCEPT, dataset.concept),
    )


def _grids(scores: pl.DataFrame) -> dict[str, list[list[float]]]:
    """Return the scores of one step by number, with one list per prompt and one value per seed in it."""
    grids: dict[str, list[list[float]]] = {}
    for number in NUMBERS:
        rows = scores.filter(number=number).sort("prompt", "seed")
        by_prompt = rows.group_by("prompt", maintain_order=True).agg("score")["score"].to_list()
        if by_prompt:
            grids[number] = np.round(by_prompt, 4).tolist()
    return grids
