from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, ModularPipeline
from PIL import Image

from demo.tiny_models import TINY, make_tiny
from demo.tiny_models.parts import WORDS
from tests.tiny_models import TinyModel

BASE = Path(__file__).parents[2] / "demo" / "base"

NEED_TORCHVISION = {
    "Anima",
    "FLUX.2 dev",
    "Qwen-Image-Edit",
    "Qwen-Image-Edit (first)",
    "Qwen-Image 2.1",
    "Qwen-Image 2.1 Turbo",
    "Kandinsky 5 (image)",
    "Bria FIBO 2",
}
"""Models whose image or video processor, or transformer, requires torchvision."""

ARGUMENTS: dict[str, dict[str, Any]] = {
    "FLUX.1 Kontext": {"max_area": 64 * 64, "_auto_resize": False},
    "Qwen-Image-Edit": {"image": Image.new("RGB", (64, 64))},
    "Qwen-Image-Edit (first)": {"image": Image.new("RGB", (64, 64))},
    "Ideogram 4": {"guidance_schedule": (7.0,)},
    "Wan 2.1 (image)": {"num_frames": 1, "output_type": "pil"},
}
"""Arguments that a pipeline requires for one step at 64x64 pixels, besides the usual ones."""


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.slow
def test_every_process_builds_the_same_bytes(tiny_sd: Path, tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from demo.tiny_models import make_tiny\n"
    code += "make_tiny(Path(sys.argv[1]))"
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONHASHSEED": "77", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "other")], cwd=root, env=env, check=True)
    assert hashes(tmp_path / "other") == hashes(tiny_sd)


def test_another_seed_changes_the_weights_and_keeps_the_callers_random_state(
    tiny_sd: Path, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    make_tiny(tmp_path / "other", seed=1, prediction_type="v_prediction")
    assert torch.equal(torch.rand(3), expected)
    default, other = hashes(tiny_sd), hashes(tmp_path / "other")
    assert {name for name in default if default[name] != other[name]} == {
        "scheduler/scheduler_config.json",
        "text_encoder/model.safetensors",
        "unet/diffusion_pytorch_model.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
    }


def test_the_tokenizer_has_tokens_for_its_words_and_spells_other_text(tiny_sd: Path) -> None:
    from transformers import CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(tiny_sd / "tokenizer")
    assert tokenizer.model_max_length == 77
    for word in WORDS.split():
        assert tokenizer.tokenize(word) == [f"{word}</w>"]
    text = "Zażółć 日本語 \U0001f600 \x07"
    assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"][1:-1]
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True).replace(" ", "") == (
        text.lower().replace(" ", "")
    )


def test_the_tiny_model_is_smaller_than_6_mb(tiny_sd: Path) -> None:
    assert sum(path.stat().st_size for path in tiny_sd.rglob("*")) < 6_000_000


# diffusers, transformers and torch warn of each other's changes.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TINY)
def test_plain_from_pretrained_loads_each_model_and_it_draws(kind: str, tiny_model: TinyModel) -> None:
    if kind in NEED_TORCHVISION:
        pytest.importorskip("torchvision")
    assert drawn_in_one_step(tiny_model(kind), **ARGUMENTS.get(kind, {}))


def test_plain_from_pretrained_loads_the_demos_base_model_and_it_draws() -> None:
    assert drawn_in_one_step(BASE)


def drawn_in_one_step(folder: Path, **arguments: Any) -> Any:
    if (folder / "modular_model_index.json").exists():
        return drawn_by_blocks(folder)
    pipeline: Any = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.default_sample_size = 8  # HiDream's pipeline scales every size to this area
    drawn = pipeline(prompt="a cat", num_inference_steps=1, height=64, width=64, **arguments)
    return next(iter(drawn.values()))


def drawn_by_blocks(folder: Path) -> Any:
    pipeline: Any = ModularPipeline.from_pretrained(str(folder), local_files_only=True)
    pipeline.load_components(local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(prompt="a cat", num_inference_steps=1, height=64, width=64, output="images")
