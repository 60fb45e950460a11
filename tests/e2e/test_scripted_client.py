"""A client that knows only the documents of `--json` takes a folder with six faults to an exported LoRA."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from demo.choosing.datasets import SHAPE, concept_pictures, study_datasets
from demo.choosing.runs import StudyRun, study_recipe
from demo.drawing import draw_prompts
from demo.learned import load_pipeline
from demo.score import score
from demo.world import scenes
from pipeline.recipe import in_project, load_recipe
from tests.command_line import latentline_command

CLIENT = Path(__file__).with_name("scripted_client.py")

RUN = StudyRun("few known shapes", 0.004, 2)
"""A run of 60 steps that teaches a new name; in demo/results/choices.jsonl, its last step scores 0.92."""

MIN_SCORE = 0.7
"""Minimum share of the concept's prompts that are drawn right. The base model has 0."""


def plant_faults(root: Path) -> Path:
    """Write the study's pictures and recipe to `root`, plant six faults, and return the recipe's file."""
    file = study_recipe(RUN, study_datasets()[RUN.dataset], root, root / "cache").source
    text = file.read_text("utf-8")
    file.write_text(text.replace("learning_rate", "learning_rat"), encoding="utf-8")

    # The study's own pictures stay as they are, so the score is known.
    folder = root / "study" / "concept"
    first, second, third, fourth, *_ = sorted(folder.glob("*.png"))
    shutil.copy(first, folder / "copy.png")
    (folder / "cut_off.png").write_bytes(second.read_bytes()[:200])
    Image.open(third).rotate(90).save(folder / "no_caption.png")
    Image.open(fourth).rotate(90).save(folder / "empty_caption.png")
    Image.new("RGB", (64, 64), (20, 20, 20)).save(folder / "black.png")
    for name, caption in {
        "copy": first.with_suffix(".txt").read_text("utf-8"),
        "cut_off": "a red nof on a white background\n",
        "empty_caption": " \n",
        "black": "a red nof on a black background\n",
    }.items():
        (folder / f"{name}.txt").write_text(caption, encoding="utf-8")
    return file


@pytest.mark.slow
@pytest.mark.timeout(1_200)
def test_a_client_takes_a_folder_with_six_faults_to_a_lora(tmp_path: Path) -> None:
    file = plant_faults(tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    variables = {"LATENTLINE_CONFIGS": str(file.parent), "DAGSTER_HOME": str(home), "DO_NOT_TRACK": "1"}
    client = subprocess.run(
        # Without the packages of this environment.
        [sys.executable, "-I", "-S", str(CLIENT), "demo", *latentline_command()],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        check=False,
    )
    assert client.returncode == 0
    result = json.loads(client.stdout)
    assert set(result["repairs"]) == {
        "learning_rat -> learning_rate",
        *(f"concept/{name}.png" for name in ("copy", "cut_off", "no_caption", "empty_caption", "black")),
    }
    assert len(result["lora"]) == 3

    recipe = load_recipe(file)
    pipeline = load_pipeline(in_project(recipe.model.base))
    pipeline.load_lora_weights(str(recipe.output_dir / "lora"))
    pictures = draw_prompts(pipeline, [each.caption for each in concept_pictures()], seed=0)
    assert score(pictures, scenes(SHAPE)).all_three >= MIN_SCORE
