"""A slider between bright and dark pictures, trained on the demo's base model."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from assets.definitions import build_definitions
from demo.concept_pictures import known_scenes
from demo.drawing import draw_prompts
from demo.experiments import changed_demo
from demo.learned import load_pipeline
from demo.world import draw_scene
from pipeline.recipe import in_project

SCALES = (-1.0, -0.5, 0.0, 0.5, 1.0)

MIN_CHANGE = 4.0
"""Minimum change of the mean pixel value, out of 255, from one scale to the next."""


def write_pairs(folder: Path) -> None:
    """Write each picture twice: brighter and darker, with the same caption."""
    random = np.random.default_rng(5)
    for number, scene in enumerate(known_scenes()):
        picture = draw_scene(scene, random).astype(np.float32)
        for name, pixels in (("bright", 0.5 * picture + 127), ("dark", 0.5 * picture)):
            (folder / name).mkdir(exist_ok=True, parents=True)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number}.png")
            (folder / name / f"{number}.txt").write_text(scene.caption, encoding="utf-8")


@pytest.mark.slow
def test_a_slider_changes_the_brightness_with_its_scale(tmp_path: Path) -> None:
    write_pairs(tmp_path / "pictures")
    datasets = [
        {"name": name, "path": str(tmp_path / "pictures" / name), "slider": scale}
        for name, scale in (("bright", 1), ("dark", -1))
    ]
    training = {
        "steps": 60,
        "gradient_accumulation": 2,
        "learning_rate": 2e-3,
        "sample_every": 0,
        "lora": {"text_encoders": None, "conv_rank": None},
    }
    recipe = changed_demo(tmp_path, datasets=datasets, training=training)
    build_definitions([recipe]).resolve_job_def(f"{recipe.name}_train").execute_in_process()

    pipeline = load_pipeline(in_project(recipe.model.base))
    pipeline.load_lora_weights(recipe.output_dir / "lora", adapter_name="slider")
    prompts = [scene.caption for scene in known_scenes()]
    brightness: list[float] = []
    for scale in SCALES:
        pipeline.set_adapters("slider", scale)
        brightness.append(float(np.mean(draw_prompts(pipeline, prompts, seed=0))))
    assert all(higher - lower > MIN_CHANGE for lower, higher in pairwise(brightness)), brightness
