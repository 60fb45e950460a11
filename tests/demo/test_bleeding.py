"""Two concepts with exchanged captions are found by the bleeding matrix, and right ones are not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from assets.definitions import build_definitions
from demo.concept_pictures import concept_scenes
from demo.experiments import changed_demo
from demo.world import Scene, draw_scene
from pipeline.reporting.reports import read_report

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

SHAPES = {"mib": "triangle", "nof": "cross"}
"""Shapes of the base model, by new names that the LoRA teaches."""

EXCHANGED = {"mib": "cross", "nof": "triangle"}


def trained_and_evaluated(
    folder: Path, shapes: Mapping[str, str], *, seed: int, steps: int = 100
) -> Mapping[str, Any]:
    """Train the names with pictures of `shapes`, hold pictures of `SHAPES` out, and return the report."""
    random = np.random.default_rng(seed)
    for name, own in SHAPES.items():
        for number, scene in enumerate(concept_scenes()):
            held_out = number % 3 == 1
            shape = own if held_out else shapes[name]
            file = folder / "named" / (f"{name}_held_out" if held_out else name) / f"{number:02d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            picture = draw_scene(Scene(shape, scene.colour, scene.background), random)
            Image.fromarray(picture).save(file)
            caption = Scene(name, scene.colour, scene.background).caption
            file.with_suffix(".txt").write_text(caption + "\n", encoding="utf-8")

    recipe = changed_demo(
        folder,
        datasets=[
            {
                "name": dataset,
                "path": str(folder / "named" / dataset),
                "captions": {"from": "sidecar", "suffix": ".txt", "trigger": name},
                "validation_fraction": 0.999999 if dataset != name else 0.0,
            }
            for name in SHAPES
            for dataset in (name, f"{name}_held_out")
        ],
        checks={"near_duplicate_bits": 0},
        training={"steps": steps, "seed": seed, "checkpoint_every": steps, "sample_every": 0},
        evaluation={
            "prompts": [
                {"prompt": scene.caption, "role": "concept", "steps": 6, "guidance_scale": 2.5}
                for name in SHAPES
                for scene in (Scene(name, each.colour, each.background) for each in concept_scenes()[1::4])
            ],
            "steps": "last",
            "scorers": ["demo.score:WorldScorer"],
        },
    )
    return _report_after_job(recipe)


def _report_after_job(recipe: Recipe) -> Mapping[str, Any]:
    build_definitions([recipe]).resolve_job_def(f"{recipe.name}_train").execute_in_process()
    report = read_report(recipe.output_dir, "evaluation")
    assert report is not None
    return report


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_exchanged_captions_are_off_the_diagonal_and_right_ones_on_it(tmp_path: Path) -> None:
    matrices: dict[str, np.ndarray] = {}
    for kind, shapes in (("right", SHAPES), ("exchanged", EXCHANGED)):
        (tmp_path / kind).mkdir()
        (bleeding,) = trained_and_evaluated(tmp_path / kind, shapes, seed=1)["bleeding"]
        assert bleeding["concepts"] == ["mib", "nof"]
        pairs = [] if kind == "right" else [["mib", "nof"], ["nof", "mib"]]
        assert sorted(bleeding["bled"]) == pairs, kind
        matrices[kind] = np.array([[cell["mean"] for cell in row] for row in bleeding["matrix"]])
    assert (matrices["right"].diagonal() > matrices["right"][[0, 1], [1, 0]]).all()
    assert (matrices["exchanged"].diagonal() < matrices["exchanged"][[0, 1], [1, 0]]).all()
