"""A project of each supported trainer becomes a trained LoRA with the commands that README names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pipeline.cli.new import command as new
from pipeline.cli.plan import command as plan
from pipeline.cli.validate import command as validate
from pipeline.recipe import load_recipe
from tests.e2e.daemon import make_home
from tests.trainer_projects import PROJECTS

NUM_IMAGES = {
    "kohya_folders": (4, 4, 3, 3),
    "sd_scripts": (4, 4, 3),
    "onetrainer": (4, 4, 3),
    "ai_toolkit": (4, 4, 3),
    "simpletuner": (4, 4, 3),
    "diffusion_pipe": (4, 4),
}
"""Images of each dataset that the trainer would use, without its masks, samples and control images."""

SHORTENED = {
    "cache_dir: .cache/latentline ": "cache_dir: {root}/cache ",
    "output_dir: outputs/cats": "output_dir: {root}/outputs/cats",
    r"steps: \d+ ": "steps: 2 ",
    "mixed_precision: bf16": 'mixed_precision: "no"',
}
"""Changes of the written recipe, for a training of two steps outside of the project's folders."""


def in_process(command: click.Command, *arguments: str) -> str:
    """Run a command that must succeed, and return what it prints on standard output."""
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def write_recipe(root: Path, trainer: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a trainer's project and the recipe for it, and return the recipe's file."""
    monkeypatch.setenv("LATENTLINE_CONFIGS", str(root / "configs"))
    (root / "Projekt Kätzchen").mkdir()
    source = PROJECTS[trainer](root / "Projekt Kätzchen")
    report = in_process(new, "cats", "--images", str(source), "--base", str(model))
    assert "taken over:" in report
    assert "not recognised" not in report

    file = root / "configs" / "cats.yaml"
    text = file.read_text(encoding="utf-8")
    for pattern, replacement in SHORTENED.items():
        text, number = re.subn(pattern, replacement.format(root=root), text)
        assert number == 1, pattern
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize(
    "trainer",
    [
        "kohya_folders",
        *(pytest.param(name, marks=pytest.mark.slow) for name in PROJECTS if name != "kohya_folders"),
    ],
)
def test_the_project_of_a_trainer_can_be_validated_and_planned(
    trainer: str, tmp_path: Path, tiny_sd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_recipe(tmp_path, trainer, tiny_sd, monkeypatch)
    assert "valid" in in_process(validate, "cats")
    forecast = json.loads(in_process(plan, "cats", "--json", "--no-memory"))
    assert forecast["samples"] == sum(NUM_IMAGES[trainer])
    assert forecast["rejected"] == {}
    assert forecast["latents_to_make"] > 0
    assert len(load_recipe(file).datasets) == len(NUM_IMAGES[trainer])


@pytest.mark.slow
@pytest.mark.parametrize("trainer", PROJECTS)
def test_the_project_of_a_trainer_becomes_a_lora(
    trainer: str, tmp_path: Path, tiny_sd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import StableDiffusionPipeline

    write_recipe(tmp_path, trainer, tiny_sd, monkeypatch)
    completed = subprocess.run(
        [sys.executable, "-c", "from pipeline.cli.main import main; main()", "run", "cats"],
        env={**os.environ, "DAGSTER_HOME": str(make_home(tmp_path / "home")), "DO_NOT_TRACK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout[-3000:] + completed.stderr[-3000:]

    lora = tmp_path / "outputs" / "cats" / "lora"
    assert sorted(file.name for file in lora.glob("*.safetensors")) == [
        "cats_comfyui.safetensors",
        "cats_kohya.safetensors",
        "pytorch_lora_weights.safetensors",
    ]
    pipe = StableDiffusionPipeline.from_pretrained(tiny_sd, safety_checker=None)
    pipe.load_lora_weights(str(lora))
    picture = pipe("a cat", num_inference_steps=1, height=64, width=64).images[0]
    assert picture.size == (64, 64)
