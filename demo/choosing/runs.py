"""One run of the study: training by the recipe's job, and pictures of every step with their scores."""

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
    from demo.world import Array, Scene
    from pipeline.recipe import Recipe

STEPS, SAVE_EVERY = 280, 40
"""The first step that is saved is not measured, because it has learned nothing."""

OVERTRAINED_STEPS = 800
"""Ten times the step at which six pictures are learned."""

# Six steps in float32 take twice as long; the fractions of right pictures differed by at most 0.1.
_DENOISING_STEPS = 4
_DTYPE = torch.bfloat16

LEARNING_RATES = (5e-3, 1.2e-2, 2e-3)
"""A rate that suits the demo, one that is too high, and one that is too low."""

# A rate of 0.005 destroys the LoRA in so many steps.
OVERTRAINED_RATE = 2e-3

SEEDS = (1, 2)

SCORERS: Mapping[str, Any] = {"world": WorldScorer(), "pixels": PixelScorer()}
"""Scorers by their name in the results."""

_EVALUATION_SEEDS = range(4)

TRUE_CONCEPT, TRUE_KNOWN = 6, 2
"""Pictures per prompt that measure the truth."""

_FIRST_TRUE_SEED = 1000
"""Seeds of the truth start here; the evaluation uses none of them."""

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


def overtrained_runs() -> list[StudyRun]:
    """Return ten runs that train six pictures much too long; only their last step is measured."""
    half = OVERTRAINED_STEPS // 2
    return [
        StudyRun("six pictures", OVERTRAINED_RATE, seed, OVERTRAINED_STEPS, half) for seed in range(1, 11)
    ]


def train(run: StudyRun, dataset: StudyDataset, folder: Path, cache: Path) -> Recipe:
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
            "steps": run.steps,
            "learning_rate": run.learning_rate,
            "lr_scheduler": "constant",
            "seed": run.seed,
            "checkpoint_every": run.save_every,
            "validate_every": run.save_every,
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

    def load(self, lora: Path) -> Any:
        """Return a pipeline with a LoRA, for `draw`."""
        return with_lora(self._pipeline, lora)

    def draw(self, loaded: Any, prompts: Sequence[tuple[str, int]]) -> list[Array]:
        """Return a picture for each prompt and seed; pictures without a LoRA (None) are drawn once."""
        if loaded is not None:
            return _draw(loaded, prompts)
        missing = [each for each in dict.fromkeys(prompts) if each not in self._without_lora]
        self._without_lora |= dict(zip(missing, _draw(self._pipeline, missing), strict=True))
        return [self._without_lora[each] for each in prompts]


def _draw(pipeline: Any, prompts: Sequence[tuple[str, int]]) -> list[Array]:
    with torch.autocast("cpu", _DTYPE):
        return draw_seeded(pipeline, prompts, num_steps=_DENOISING_STEPS)


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

    cells = evaluation_cells(dataset)
    drawn: list[tuple[int, str, str, int, Array]] = []
    lines: list[Result] = []
    seconds = {"pictures": 0.0, "features": 0.0, "truth": 0.0}
    for step, file in {0: None, **files}.items():
        with _timed(seconds, "pictures"):
            loaded = file and artist.load(file)
            pictures = artist.draw(loaded, [cell[1:] for cell in cells])
        drawn += [(step, *cell, picture) for cell, picture in zip(cells, pictures, strict=True)]

        with _timed(seconds, "truth"):
            concept = _truth(artist, loaded, concept_scenes(), TRUE_CONCEPT)
            known = _truth(artist, loaded, known_prompts(), TRUE_KNOWN)
        line = {"run": run.name, "step": step, "concept": concept, "known": known}
        lines.append(line | {"validation_loss": losses.get(step)})

    with _timed(seconds, "features"):
        for name, scorer in SCORERS.items():
            features = _features(name, scorer, dataset, drawn, folder=recipe.source.parents[1])
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


def _truth(artist: Artist, loaded: Any, scenes: Sequence[Scene], number: int) -> list[str]:
    """Return for each scene a digit per picture: 1 if it shows shape, colour and background.

    Each picture has its own seed, so that all are independent, and all steps have the same seeds.
    """
    seeds = itertools.count(_FIRST_TRUE_SEED)
    prompts = [(scene.caption, next(seeds)) for scene in scenes for _ in range(number)]
    pictures = iter(artist.draw(loaded, prompts))
    return [
        "".join(str(int(score([next(pictures)], [scene]).all_three)) for _ in range(number))
        for scene in scenes
    ]


def evaluation_cells(dataset: StudyDataset) -> list[tuple[str, str, int]]:
    """Return role, prompt and seed of each picture of the evaluation."""
    concept = dict.fromkeys(each.caption for each in dataset.held_out)
    prompts = [*(("concept", each) for each in concept), *(("base", each.caption) for each in _BASE_PROMPTS)]
    return [(role, prompt, seed) for role, prompt in prompts for seed in _EVALUATION_SEEDS]


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
