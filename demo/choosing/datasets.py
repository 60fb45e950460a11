"""Datasets of the study: pictures of the concept that users could have, good ones and bad ones.

The concept is a new name, `NAME`, for a shape that the base model can draw. It is learned within fifty
steps, while most pictures of the demo's own concept are wrong after three hundred.

Each dataset has pictures to train on, others to hold out, and pictures of known shapes with their own names,
which keep a LoRA from changing them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from demo.concept_pictures import known_scenes
from demo.world import Scene, draw_scene, scenes

HELD_OUT, CONCEPT, KNOWN = "held_out", "concept", "known"
"""Names of the recipe's datasets and of their folders."""

NAME, SHAPE = "nof", "cross"
"""Name that a run teaches, and the shape that it means."""

_EVERY_THIRD = slice(1, None, 3)


@dataclass(frozen=True)
class Picture:
    """A picture of one scene with the caption of the same or, by mistake, of another one."""

    scene: Scene
    caption: str


@dataclass(frozen=True)
class StudyDataset:
    """Pictures of one dataset of the study."""

    concept: Sequence[Picture]
    held_out: Sequence[Picture]
    known: Sequence[Picture]

    def write(self, folder: Path) -> None:
        """Write pictures and captions into one folder per dataset of the recipe."""
        random = np.random.default_rng(50)
        parts: Mapping[str, Sequence[Picture]] = {
            CONCEPT: self.concept,
            HELD_OUT: self.held_out,
            KNOWN: self.known,
        }
        for name, pictures in parts.items():
            for number, picture in enumerate(pictures):
                file = folder / name / f"{number:02d}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(draw_scene(picture.scene, random)).save(file)
                file.with_suffix(".txt").write_text(picture.caption + "\n", encoding="utf-8")


def concept_pictures() -> list[Picture]:
    """Return the concept in every colour and on every background, with captions that have its name."""
    return [Picture(scene, Scene(NAME, scene.colour, scene.background).caption) for scene in scenes(SHAPE)]


def study_datasets() -> dict[str, StudyDataset]:
    """Return the datasets by name."""
    pictures = concept_pictures()
    held_out = pictures[_EVERY_THIRD]
    concept = [each for each in pictures if each not in held_out]
    known = [Picture(scene, scene.caption) for scene in known_scenes()]

    # The holdout of a dataset has the same faults: one background only, and wrong captions.
    white = [each for each in pictures if each.scene.background == "white"]
    careless = _exchange_every_fourth(pictures)
    return {
        "balanced": StudyDataset(concept, held_out, known),
        "few known shapes": StudyDataset(concept, held_out, known[::3]),
        "six pictures": StudyDataset(concept[::3], held_out, known[::3]),
        "white backgrounds": StudyDataset(white * 2, white, known),
        "wrong captions": StudyDataset(
            [each for number, each in enumerate(careless) if number % 3 != 1], careless[_EVERY_THIRD], known
        ),
    }


def _exchange_every_fourth(pictures: Sequence[Picture]) -> list[Picture]:
    wrong = list(range(0, len(pictures), 4))
    following = dict(zip(wrong, [*wrong[1:], wrong[0]], strict=True))
    return [
        replace(each, caption=pictures[following[number]].caption) if number in following else each
        for number, each in enumerate(pictures)
    ]
