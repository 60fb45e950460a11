"""The pictures that teach the concept, and pictures of known shapes that keep the LoRA from changing them.

    python -m demo.concept_pictures data/demo

It writes `data/demo/concept` and `data/demo/known`, with each caption in a .txt file beside its picture. You
can change captions and pictures, or add your own, and run the job again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from demo.world import CONCEPT, SHAPES, Scene, draw_scene, scenes

SEED = 22


def concept_scenes() -> list[Scene]:
    """Return the concept in every colour and on every background."""
    return scenes(CONCEPT)


def known_scenes() -> list[Scene]:
    """Return as many scenes of known shapes, in the same colours and on the same backgrounds."""
    shapes = list(SHAPES)
    return [
        Scene(shapes[number % len(shapes)], scene.colour, scene.background)
        for number, scene in enumerate(concept_scenes())
    ]


def write_pictures(folder: Path, seed: int = SEED) -> int:
    """Write both datasets and return the number of new files; existing files keep their edits."""
    random = np.random.default_rng(seed)
    return sum(
        _write_dataset(folder / name, dataset, random)
        for name, dataset in (("concept", concept_scenes()), ("known", known_scenes()))
    )


def _write_dataset(folder: Path, dataset: Sequence[Scene], random: np.random.Generator) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    num_written = 0
    for scene in dataset:
        picture = Image.fromarray(draw_scene(scene, random))
        image = folder / f"{scene.colour}_{scene.shape}_{scene.background}.png"
        caption = image.with_suffix(".txt")
        if not image.exists():
            picture.save(image)
            num_written += 1
        if not caption.exists():
            caption.write_text(scene.caption + "\n", encoding="utf-8")
            num_written += 1
    return num_written


if __name__ == "__main__":
    target = Path(sys.argv[1])
    number = write_pictures(target)
    count = len(concept_scenes()) + len(known_scenes())
    print(f"demo pictures: {count} pictures with captions in {target}, {number} new files")
