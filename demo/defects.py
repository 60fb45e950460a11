"""The study of all that a user can find before training: defects that are planted in the demo's dataset.

    python -m demo.defects outputs/defects            # ten seeds, half a minute each; stop it at any time
    python -m demo.defects outputs/defects --seeds 0  # the table of the stored results

The results are in demo/results/defects.jsonl, one line per seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageFilter

from demo.cached_dataset import Change, dataset
from demo.diagnosing import diagnosed, exchange_captions
from demo.picture_faults import CHECKS, named_samples
from demo.stored_results import Result, run_study
from demo.world import SHAPES, draw_scene, scene_of
from pipeline.recipe.project import project_root
from pipeline.reporting.findings import CheckContext
from pipeline.storage.tables import Tables
from pipeline.validated_dataset import checks

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

RESULTS = project_root() / "demo" / "results" / "defects.jsonl"

TOP = 6
"""Number of images that a person looks at."""

BLUR_PX = 1.5
"""Sigma of the blur, the weakest one of `demo.picture_faults`."""


def plant(pictures: Path, seed: int, *, names: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Plant four defects, and return the kind of each defect by the name of its image.

    `names` has the shape that a new name means, for each new name in the captions.
    """
    wrong = sorted(Path(each).stem for each in exchange_captions(pictures, 2, seed))
    others = [file for file in sorted(pictures.rglob("*.png")) if file.stem not in wrong]
    choice = random.Random(seed)
    reshaped, blurred = choice.sample(others, 2)

    scene = scene_of(reshaped.with_suffix(".txt").read_text("utf-8"))
    assert scene is not None
    right = names.get(scene.shape, scene.shape)
    shape = choice.choice([each for each in SHAPES if each != right])
    picture = draw_scene(replace(scene, shape=shape), np.random.default_rng(seed))
    Image.fromarray(picture).save(reshaped)

    with Image.open(blurred) as opened:
        image = opened.filter(ImageFilter.GaussianBlur(BLUR_PX))
    image.save(blurred)
    return {**dict.fromkeys(wrong, "caption"), reshaped.stem: "shape", blurred.stem: "blurred"}


def trial(folder: Path, cache: Path, seed: int, **sections: Any) -> Result:
    """Return what caption swap and checks name, in a dataset with the defects and in one without.

    `sections` are changes of the demo's recipe.
    """
    recipe, planted = dataset(folder / "planted", cache, seed, plant_with(seed), **sections)
    clean, _ = dataset(folder / "clean", cache, seed, nothing, **sections)
    named_if_clean = {f"clean_{name}": images for name, images in named_images(clean).items()}
    return {"planted": planted, **named_images(recipe), **named_if_clean}


def named_images(recipe: Recipe) -> Result:
    """Return the `captions` that do not fit, the worst first, and the `pictures` that the checks name."""
    table = diagnosed(recipe, frozenset()).table
    worst = table.filter(verdict="does not fit").sort("score", descending=True)
    findings = {each.name: each for each in checks.run(CheckContext(recipe, Tables(recipe.output_dir)))}
    named = set[str]().union(*(named_samples(findings[check]) for check in CHECKS))
    return {"captions": [Path(each).stem for each in worst["sample_id"]], "pictures": sorted(named)}


def plant_with(seed: int) -> Change:
    """Return the change of a dataset that plants the defects of a seed."""
    return lambda pictures: plant(pictures, seed)


def nothing(_pictures: Path) -> dict[str, str]:
    """Change no picture."""
    return {}


def top(result: Result) -> list[str]:
    """Return the images that a person looks at first: captions by score, then pictures."""
    return list(dict.fromkeys([*result["captions"], *result["pictures"]]))[:TOP]


def report(results: Iterable[Result]) -> Iterator[str]:
    """Yield the table of docs/diagnosis.md as Markdown."""
    yield "| seed | found in the first six | by the checks | false alarms | false alarms, clean |"
    yield "|---" * 5 + "|"
    for each in results:
        planted, named = each["planted"], {*each["captions"], *each["pictures"]}
        missed = sorted(kind for name, kind in planted.items() if name not in top(each))
        found = f"{len(planted) - len(missed)} of {len(planted)}"
        cells = (
            each["seed"],
            f"{found}, not {', '.join(missed)}" if missed else found,
            len(planted.keys() & set(each["pictures"])),
            len(named - planted.keys()),
            len({*each["clean_captions"], *each["clean_pictures"]}),
        )
        yield f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    run_study(__doc__, RESULTS, trial, report)
