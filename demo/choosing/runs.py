"""One run of the study: training by the recipe's job, and pictures of every step with their scores.

The truth of a step needs many pictures, but only for steps that may be the best. So each step gets a few, and
the steps that are nearly as good as the best of them get the others.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import torch
from PIL import Image

from demo.choosing.datasets import (
    CONCEPT,
    HELD_OUT,
    KNOWN,
    NAME,
    SHAPE,
    Picture,
    StudyDataset,
    concept_pictures,
    study_datasets,
)
from demo.drawing import draw_seeded
from demo.experiments import changed_demo
from demo.learned import MAX_LOST
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

STEPS, SAVE_EVERY = 60, 10
"""The first step that is saved is not measured, because it has learned nothing."""

# In float32, pictures take twice as long.
_DENOISING_STEPS = 4
_DTYPE = torch.bfloat16

LEARNING_RATES = (4e-3, 1e-2, 2.5e-3)
"""A rate that suits the concept, one that is too high, and one that is too low."""

SEEDS = (2, 3)
"""Trial runs, which decided the settings, had the seeds 1, 11 and 12."""

SCORERS: Mapping[str, Any] = {"world": WorldScorer(), "pixels": PixelScorer()}
"""Scorers by their name in the results."""

_EVALUATION_SEEDS = range(4)

FIRST_CONCEPT, FIRST_KNOWN = 3, 1
"""Pictures per prompt that measure the truth of every step."""

TRUE_CONCEPT, TRUE_KNOWN = 9, 3
"""Pictures per prompt that measure the truth of steps that may be the best."""

_NEARLY = 0.85
"""Minimum first truth of a step that may be the best, relative to the highest one."""

_FIRST_TRUE_SEED = 1000
"""Seeds of the truth start here; the evaluation uses none of them."""

_SEEDS_PER_PROMPT = 100

_KNOWN_SHAPES = tuple(shape for shape in SHAPES if shape != "star")
"""The base model itself draws only a third of its stars right with so few denoising steps."""

_BASE_PROMPTS = scenes(*_KNOWN_SHAPES)[1::9]
"""Known shapes on which drift is measured."""

_TRUE_KNOWN_SHAPES = scenes(*_KNOWN_SHAPES)[::3]
"""Known shapes on which the truth is measured; the two lists have nothing in common."""

_ALMOST_ALL = 0.999999
"""`validation_fraction` of the dataset that is held out; 1 is not allowed."""

Result = dict[str, Any]


@dataclass(frozen=True)
class StudyRun:
    """Settings of one run."""

    dataset: str
    learning_rate: float
    seed: int
    steps: int = STEPS
    save_every: int = SAVE_EVERY

    @property
    def name(self) -> str:
        """Name of the run in the results."""
        steps = "" if self.steps == STEPS else f", {self.steps} steps"
        return f"{self.dataset}, {self.learning_rate:g}, seed {self.seed}{steps}"


def study_runs() -> list[StudyRun]:
    """Return all runs; the first fifteen have every dataset and learning rate once."""
    return [
        StudyRun(dataset, rate, seed)
        for seed, rate, dataset in itertools.product(SEEDS, LEARNING_RATES, study_datasets())
    ]


def train(run: StudyRun, dataset: StudyDataset, folder: Path, cache: Path) -> Recipe:
    """Train the run in an empty folder by the recipe's job, and return its recipe."""
    from assets.definitions import build_definitions

    recipe = study_recipe(run, dataset, folder, cache)
    build_definitions([recipe]).resolve_job_def(f"{recipe.name}_train").execute_in_process()
    return recipe


def study_recipe(run: StudyRun, dataset: StudyDataset, folder: Path, cache: Path, **sections: Any) -> Recipe:
    """Write the pictures of a run into an empty folder, and return its recipe with other sections added."""
    dataset.write(folder / "study")
    return changed_demo(
        folder,
        datasets=[
            {
                "name": name,
                "path": str(folder / "study" / name),
                "captions": {"from": "sidecar", "suffix": ".txt"},
                "validation_fraction": _ALMOST_ALL if name == HELD_OUT else 0.0,
            }
            for name in (CONCEPT, HELD_OUT, KNOWN)
        ],
        cache_dir=str(cache),
        # Pictures of one world resemble each other more than photographs.
        checks={"near_duplicate_bits": 0},
        accelerate={"cpu_threads": 1, "mixed_precision": "bf16"},
        training={
            "steps": run.steps,
            "learning_rate": run.learning_rate,
            "lr_scheduler": "cosine",
            "warmup_steps": 10,
            "seed": run.seed,
            "checkpoint_every": run.save_every,
            "validate_every": run.save_every,
            "sample_every": 0,
            "trackers": [],
        },
        **sections,
    )


class Artist:
    """Draws with the base model, and with LoRAs merged into copies of it."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._base = copy.deepcopy(pipeline).to(_DTYPE)
        self._without_lora: dict[tuple[str, int], Array] = {}

    def load(self, lora: Path | None) -> Any:
        """Return a pipeline with a LoRA, or without one, for `draw`."""
        return self._base if lora is None else with_lora(self._pipeline, lora).to(_DTYPE)

    def draw(self, loaded: Any, prompts: Sequence[tuple[str, int]]) -> list[Array]:
        """Return a picture for each prompt and seed; pictures without a LoRA are drawn once."""
        if loaded is not self._base:
            return draw_seeded(loaded, prompts, num_steps=_DENOISING_STEPS)
        missing = [each for each in dict.fromkeys(prompts) if each not in self._without_lora]
        drawn = draw_seeded(self._base, missing, num_steps=_DENOISING_STEPS)
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
    saved = {step: each / layout_file("diffusers", "") for step, each in lora_steps(layout).items()}
    files = dict(sorted(saved.items())[1:])
    losses = {line["step"]: line["loss"] for line in read_metrics(layout.validation, max(files) + 1)}

    cells = evaluation_cells()
    drawn: list[tuple[int, str, str, int, Array]] = []
    lines: list[Result] = []
    seconds = {"pictures": 0.0, "features": 0.0, "truth": 0.0}
    for step, file in {0: None, **files}.items():
        loaded = artist.load(file)
        with _timed(seconds, "pictures"):
            pictures = artist.draw(loaded, [cell[1:] for cell in cells])
        drawn += [(step, *cell, picture) for cell, picture in zip(cells, pictures, strict=True)]
        with _timed(seconds, "truth"):
            truth = _truth(artist, loaded, range(FIRST_CONCEPT), range(FIRST_KNOWN))
        lines.append({"run": run.name, "step": step, **truth, "validation_loss": losses.get(step)})

    with _timed(seconds, "truth"):
        for line in (lines[0], *_nearly_best(lines)):
            more = range(FIRST_CONCEPT, TRUE_CONCEPT), range(FIRST_KNOWN, TRUE_KNOWN)
            truth = _truth(artist, artist.load(files.get(line["step"])), *more)
            for name, digits in truth.items():
                line[name] = [first + others for first, others in zip(line[name], digits, strict=True)]

    with _timed(seconds, "features"):
        for name, scorer in SCORERS.items():
            features = study_features(name, scorer, dataset, drawn, folder=recipe.source.parents[1])
            table = measure([features]).scores
            for line in lines[1:]:
                line[name] = _grids(table.filter(step=line["step"]))
    lines[0]["cpu_seconds"] = {part: round(value, 1) for part, value in seconds.items()}
    return lines


@contextmanager
def _timed(seconds: dict[str, float], part: str) -> Generator[None]:
    start = time.process_time()
    yield
    seconds[part] += time.process_time() - start


def _nearly_best(lines: Sequence[Result]) -> list[Result]:
    """Return the steps that may be the best, by the first pictures of each."""

    def fraction(line: Result, name: str) -> float:
        return "".join(line[name]).count("1") / sum(map(len, line[name]))

    # Twice the limit, because the first pictures of known shapes are few.
    known = fraction(lines[0], "known")
    keeping = [line for line in lines[1:] if known - fraction(line, "known") <= 2 * MAX_LOST]
    highest = max((fraction(line, "concept") for line in keeping), default=0.0)
    return [line for line in keeping if highest and fraction(line, "concept") >= _NEARLY * highest]


def _truth(artist: Artist, loaded: Any, concept: range, known: range) -> dict[str, list[str]]:
    """Return for each prompt a digit per picture: 1 if it shows shape, colour and background.

    Each picture has its own seed, so that all are independent, and all steps have the same seeds.

    Args:
        artist: Draws the pictures.
        loaded: Pipeline of the step.
        concept: Numbers of the pictures of each prompt of the concept.
        known: The same for known shapes.
    """
    wanted = {
        "concept": (concept_pictures(), concept),
        "known": ([Picture(scene, scene.caption) for scene in _TRUE_KNOWN_SHAPES], known),
    }
    digits: dict[str, list[str]] = {}
    for name, (prompts, numbers) in wanted.items():
        seeds = [
            (each.caption, _FIRST_TRUE_SEED + index * _SEEDS_PER_PROMPT + number)
            for index, each in enumerate(prompts)
            for number in numbers
        ]
        pictures = iter(artist.draw(loaded, seeds))
        digits[name] = [
            "".join(str(int(score([next(pictures)], [each.scene]).all_three)) for _ in numbers)
            for each in prompts
        ]
    return digits


def evaluation_cells() -> list[tuple[str, str, int]]:
    """Return role, prompt and seed of each picture of the evaluation."""
    prompts = [
        *(("concept", each.caption) for each in concept_pictures()),
        *(("base", each.caption) for each in _BASE_PROMPTS),
    ]
    return [(role, prompt, seed) for role, prompt in prompts for seed in _EVALUATION_SEEDS]


def study_features(
    name: str,
    scorer: Any,
    dataset: StudyDataset,
    drawn: Sequence[tuple[int, str, str, int, Array]],
    *,
    folder: Path,
) -> ScorerFeatures:
    """Return the features of pictures and of the study's images.

    Args:
        name: Name of the scorer.
        scorer: Computes the features.
        dataset: Dataset of the run.
        drawn: Step, role, prompt, seed and picture; step 0 is the base model.
        folder: Folder of the study's images.
    """

    def references(part: str, pictures: Sequence[Picture]) -> References:
        files = sorted((folder / "study" / part).glob("*.png"))
        names = [f"{part}/{file.name}" for file in files]
        captions = [each.caption for each in pictures]
        features = scorer.picture_features([Image.open(file) for file in files])
        return References([NAME] * len(files), names, captions, names, features)

    rows = [
        {
            "step": step,
            "strength": 1.0 if step else 0.0,
            "prompt": prompt,
            "role": role,
            "concept": NAME if role == "concept" else "",
            "seed": seed,
            "row": row,
            "picture": "",
        }
        for row, (step, role, prompt, seed, _) in enumerate(drawn)
    ]
    prompts = sorted({prompt for _, _, prompt, _, _ in drawn})

    # The demo's scorer knows the shapes by their own names.
    meanings = [prompt.replace(f" {NAME} ", f" {SHAPE} ") for prompt in prompts]
    texts = dict(zip(prompts, scorer.text_features(meanings), strict=True)) if scorer.reads_texts else None
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
