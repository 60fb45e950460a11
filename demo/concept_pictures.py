"""The pictures that teach the concept, and pictures of known shapes that keep the LoRA from changing them.

    python -m demo.concept_pictures data/demo
    python -m demo.concept_pictures data/demo_captions --without-captions

The first command writes `data/demo/concept` and `data/demo/known`, with each caption in a .txt file beside
its picture. You can change captions and pictures, or add your own, and run the job again. The second one
writes the same pictures alone, for the recipe in which a model captions them.
"""

from __future__ import annotations

import argparse
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


def scene_of_file(file: Path) -> Scene | None:
    """Return the scene in the name of a picture; None for a file that has another name."""
    parts = file.stem.split("_")
    scene = Scene(parts[1], parts[0], parts[2]) if len(parts) == 3 else None
    return scene if scene in (*concept_scenes(), *known_scenes()) else None


def write_pictures(folder: Path, seed: int = SEED, *, with_captions: bool = True) -> int:
    """Write both datasets and return the number of new files; existing files keep their edits."""
    random = np.random.default_rng(seed)
    return sum(
        _write_dataset(folder / name, dataset, random, with_captions=with_captions)
        for name, dataset in (("concept", concept_scenes()), ("known", known_scenes()))
    )


def _write_dataset(
    folder: Path, dataset: Sequence[Scene], random: np.random.Generator, *, with_captions: bool
) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    num_written = 0
    for scene in dataset:
        picture = Image.fromarray(draw_scene(scene, random))
        image = folder / f"{scene.colour}_{scene.shape}_{scene.background}.png"
        caption = image.with_suffix(".txt")
        if not image.exists():
            picture.save(image)
            num_written += 1
        if with_captions and not caption.exists():
            caption.write_text(scene.caption + "\n", encoding="utf-8")
            num_written += 1
    return num_written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--without-captions", action="store_true", help="write no caption files")
    arguments = parser.parse_args()
    number = write_pictures(arguments.folder, with_captions=not arguments.without_captions)
    count = len(concept_scenes()) + len(known_scenes())
    what = "pictures" if arguments.without_captions else "pictures with captions"
    print(f"demo pictures: {count} {what} in {arguments.folder}, {number} new files")
