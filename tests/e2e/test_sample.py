"""`latentline sample` as a complete command: pictures equal the previews, progress, errors and Ctrl-C."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.e2e.problems import problem_of
from tests.e2e.pseudo_terminal import run_on_terminal

TRAINING = {
    "steps": 4,
    "batch_size": 2,
    "checkpoint_every": 2,
    "sample_every": 2,
    "sample_prompts": ["a photograph of a cat"],
    "lora": {"rank": 2, "alpha": 2.0},
}


@pytest.fixture
def trained(cached: Any) -> Any:
    """A workspace with a finished run that has LoRAs and previews of the steps 2 and 4."""
    cached.recipe(training=TRAINING)
    assert cached.execute("train").success
    return cached


@pytest.mark.slow
def test_a_grid_of_steps_and_strengths_equals_the_previews_of_training(trained: Any) -> None:
    drawn = trained.latentline("sample", "small", "--step", "2,4", "--strength", "0,1")
    assert drawn.returncode == 0, drawn.stderr
    folder = trained.out / "reports" / "pictures" / "001"
    assert drawn.stdout.splitlines() == [f"4 pictures in {folder}", f"sheet: {folder / 'sheet.jpg'}"]
    assert "steps 2, 4, strength 0, 1, 1 prompt, seed 42: 4 pictures" in drawn.stderr
    assert "drawing pictures: 4 of 4" in drawn.stderr

    [samples] = trained.out.glob("runs/*/samples")
    for step in (2, 4):
        for strength, preview_step in ((0, 0), (1, step)):
            picture = folder / f"step-{step:08d}-strength-{strength}-prompt-01.png"
            preview = samples / f"step-{preview_step:08d}-00.png"
            assert np.array_equal(np.asarray(Image.open(picture)), np.asarray(Image.open(preview)))

    kohya = trained.out / "lora" / "small_kohya.safetensors"
    other = trained.latentline("sample", "small", "a prompt", "--lora", str(kohya), "--output", "other")
    assert other.returncode == 0, other.stderr
    names = sorted(path.name for path in (trained.root / "other").iterdir())
    assert names == ["lora-strength-1-prompt-01.png", "sheet.jpg"]

    problem = problem_of(trained.latentline("sample", "small", "--step", "3"))
    assert "did not save a LoRA at step 3; the closest is step 2" in problem.what
    assert problem.fix == "use --step 2, or another of its 2 steps: 2, 4"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="this system has no pseudo-terminals")
def test_ctrl_c_keeps_the_pictures_that_are_complete(trained: Any) -> None:
    folder = trained.out / "reports" / "pictures" / "001"
    strengths = ",".join(str(number / 100) for number in range(1, 200))
    command = [sys.executable, "-c", "from pipeline.cli.main import main; main()", "sample", "small"]
    transcript = run_on_terminal(
        [*command, "--strength", strengths],
        environment=trained.environment(),
        cwd=trained.root,
        press_ctrl_c=lambda: any(folder.glob("*.png")),
    )
    assert transcript.status == 130, transcript.text
    assert len(transcript.lines) < 10
    drawn = len(list(folder.glob("*.png")))
    assert transcript.lines[-3:] == [
        f"Stopped: {drawn} of 199 pictures drawn",
        f"  where: {folder}",
        "  fix:   run the command again, with fewer pictures if it takes too long",
    ]
    assert {path.suffix for path in folder.iterdir()} == {".png"}
    assert "Traceback" not in transcript.raw
    assert "drawing pictures" in transcript.raw, "a progress bar was drawn"
