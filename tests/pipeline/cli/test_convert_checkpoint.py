"""`latentline convert-checkpoint`: its child process, its output, and the files it writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image

from pipeline.cli.convert_checkpoint import command
from pipeline.cli.validate import command as validate
from pipeline.models.worker.family import load_family
from tests.pipeline.models.convert import unet_originals
from tests.pipeline.models.convert.conversion_case import as_file, require_same

MAIN = "from pipeline.cli.main import main; main()"
RECIPE = """\
datasets: [{{name: photos, path: {root}/photos, captions: {{from: fixed, text: a photo}}}}]
cache_dir: {root}/cache
output_dir: {root}/out
{model}
"""


def call(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(each) for each in arguments], catch_exceptions=False)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", MAIN, "convert-checkpoint", *map(str, arguments)]
    return subprocess.run(words, env={**os.environ}, capture_output=True, text=True, check=False)


@pytest.fixture
def file(tmp_path: Path, tiny_sdxl: Path) -> Path:
    """Return a checkpoint with the marks of velocity prediction and zero terminal SNR."""
    marks = {"v_pred": torch.tensor([]), "ztsnr": torch.tensor([])}
    return as_file(tmp_path / "noob.safetensors", unet_originals.stable_diffusion_xl(tiny_sdxl) | marks)


@pytest.mark.slow
def test_the_printed_lines_make_a_valid_recipe(tmp_path: Path, tiny_sdxl: Path, file: Path) -> None:
    folder = tmp_path / "models" / "noob"
    completed = call(file, folder, "--like", tiny_sdxl)
    assert completed.exit_code == 0
    for text in (
        "unet: from the file, in float32",
        "predicts v_prediction, according to the file",
        "zero terminal SNR",
    ):
        assert text in completed.output
    require_same(folder, tiny_sdxl, ("unet", "vae", "text_encoder", "text_encoder_2"))
    scheduler = load_family(folder).noise.load_scheduler()
    assert float(scheduler.alphas_cumprod[-1]) == 0.0
    assert [each.name for each in folder.parent.iterdir()] == ["noob"]
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "photos" / "a.png")
    lines = completed.output.split("in a recipe:\n")[1].splitlines()[:2]
    assert lines[1].strip() == f"base: {folder}"
    recipe = tmp_path / "noob.yaml"
    recipe.write_text(
        RECIPE.format(root=tmp_path, model="\n".join(line[2:] for line in lines)), encoding="utf-8"
    )
    assert CliRunner().invoke(validate, [str(recipe)], catch_exceptions=False).exit_code == 0


@pytest.mark.slow
def test_an_error_in_the_converting_process_ends_the_command_and_leaves_no_files(
    tmp_path: Path, tiny_sdxl: Path, file: Path
) -> None:
    state = unet_originals.stable_diffusion_xl(tiny_sdxl)
    state["model.diffusion_model.out.2.bias"] = torch.zeros(5)
    as_file(file, state)
    completed = run(file, tmp_path / "noob", "--like", tiny_sdxl)
    assert completed.returncode == 1
    assert "ModelError: the file's unet does not match the configuration" in completed.stderr
    assert "fix:   name the model that the file was made from in --like" in completed.stderr
    assert [each.name for each in tmp_path.iterdir()] == [file.name]


def test_a_mistake_is_reported_before_torch_is_imported(tmp_path: Path, tiny_sdxl: Path, file: Path) -> None:
    script = f"""
import sys
sys.argv = ["latentline", "convert-checkpoint", {str(file)!r}, {str(tiny_sdxl)!r}]
from pipeline.cli.main import main
try:
    main()
finally:
    assert not {{"torch", "diffusers", "transformers"}} & set(sys.modules)
"""
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert completed.returncode == 1
    assert "ModelError: the folder exists already and is never overwritten" in completed.stderr
    assert "AssertionError" not in completed.stderr
