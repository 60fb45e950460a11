"""A new name for a shape that the base model can draw, in place of the concept of the demo's 48 pictures.

It is the one of `demo.choosing`. It is learned in 60 steps, and its score depends less on chance than that of
the demo's own concept, which takes 400.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from PIL import Image

from demo.cached_dataset import dataset, in_process, training_job
from demo.choosing.datasets import CONCEPT, KNOWN, NAME, concept_pictures
from demo.choosing.runs import LEARNING_RATES
from demo.drawing import draw_seeded
from demo.learned import known_prompts, load_adapter, load_pipeline
from demo.score import score
from demo.world import draw_scene
from pipeline.processes.launch import TRAINING_MODULE
from pipeline.trained_lora.export.lora_files import layout_file
from pipeline.trained_lora.run_folder import RunLayout, lora_steps

if TYPE_CHECKING:
    from demo.cached_dataset import Change
    from demo.world import Scene
    from pipeline.trained_lora.job import TrainingJob

STEPS = 60

NUM_DRAWINGS = 4
"""Number of pictures of each prompt of the concept that a score counts."""

_CAPTIONS = {"from": "sidecar", "suffix": ".txt"}

_KNOWN_SEED = 1 << 48
"""Seeds of pictures of known shapes start here; the concept's are below."""


def new_name_job(
    folder: Path, cache: Path, seed: int, change: Change, **training: Any
) -> tuple[TrainingJob, dict[str, str]]:
    """Draw the pictures, change them, fill the caches, and return the job and what was changed.

    Args:
        folder: A folder that does not exist yet.
        cache: Folder of the cache, which several datasets may share.
        seed: Seed of the pictures and of the training.
        change: Changes the pictures.
        training: Changes of the training.
    """
    folder.mkdir()

    def teach_name_and_change(pictures: Path) -> dict[str, str]:
        _draw_concept(pictures / CONCEPT, seed)
        return change(pictures)

    datasets = [
        {"name": name, "path": str(folder / "pictures" / name), "captions": {**_CAPTIONS, **trigger}}
        for name, trigger in ((CONCEPT, {"trigger": NAME}), (KNOWN, {}))
    ]
    settings: Mapping[str, Any] = {
        "steps": STEPS,
        "learning_rate": LEARNING_RATES[0],
        "warmup_steps": 10,
        "seed": seed,
        "checkpoint_every": STEPS,
        "sample_every": 0,
        "trackers": [],
        **training,
    }
    recipe, changed = dataset(
        folder, cache, seed, teach_name_and_change, datasets=datasets, training=settings
    )
    return training_job(recipe), changed


def _draw_concept(folder: Path, seed: int) -> None:
    """Replace the pictures of the demo's concept by those of a shape with a new name."""
    for file in folder.iterdir():
        file.unlink()
    random = np.random.default_rng([seed, 2])
    for each in concept_pictures():
        file = folder / f"{each.scene.colour}_{NAME}_{each.scene.background}.png"
        Image.fromarray(draw_scene(each.scene, random)).save(file)
        file.with_suffix(".txt").write_text(each.caption + "\n", encoding="utf-8")


def teach(job: TrainingJob, *, without: Collection[str] = ()) -> Path:
    """Train, and return the file with the adapter of the last step.

    `without` are names of images to leave out. They keep their places with weight 0, so that all others have
    the same order and noise.
    """
    name = pl.col("sample_id").str.extract(r"(\w+)\.png$")
    left_out = job.inputs.trained.table.filter(name.is_in(list(without)))["variant_id"]
    job = replace(job, run=("1" if without else "0") * 16, left_out=frozenset(left_out))
    in_process(TRAINING_MODULE, job.write())
    return lora_steps(RunLayout(job.folder))[STEPS] / layout_file("diffusers", "")


def concept_score(base: Path, adapter: Path | None, seed: int) -> float:
    """Return the fraction of pictures of the concept with the right shape, colour and background.

    Args:
        base: Folder of the base model.
        adapter: File of the adapter; None for the base model alone.
        seed: Seed of the pictures.
    """
    wanted = concept_pictures() * NUM_DRAWINGS
    prompts = [each.caption for each in wanted]
    return _score(base, adapter, prompts, [each.scene for each in wanted], first_seed=seed << 32)


def known_score(base: Path, adapter: Path | None) -> float:
    """Return the same for known shapes with their own names."""
    wanted = known_prompts()
    return _score(base, adapter, [each.caption for each in wanted], wanted, first_seed=_KNOWN_SEED)


def _score(
    base: Path, adapter: Path | None, prompts: list[str], scenes: list[Scene], *, first_seed: int
) -> float:
    pipeline = copy.deepcopy(_pipeline(base))
    if adapter is not None:
        load_adapter(pipeline, adapter)
    seeded = [(prompt, first_seed + number) for number, prompt in enumerate(prompts)]
    return score(draw_seeded(pipeline, seeded), scenes).all_three


_pipeline = cache(load_pipeline)
