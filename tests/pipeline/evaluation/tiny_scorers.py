"""Tiny models of the scorers' classes, with random weights, in the format of transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def write_dino(folder: Path, tiny_sd: Path) -> None:
    """Write a `Dinov2Model` with its image processor."""
    from transformers import BitImageProcessorPil, Dinov2Config, Dinov2Model

    del tiny_sd
    _save(folder, lambda: Dinov2Model(Dinov2Config(**_VISION)))
    processor = BitImageProcessorPil(size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32})
    processor.save_pretrained(folder)


def write_clip(folder: Path, tiny_sd: Path) -> None:
    """Write a `CLIPModel` with its processors; the tokenizer is Stable Diffusion's."""
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(tiny_sd / "tokenizer")
    marks = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = {**_TEXT, **marks, "vocab_size": len(tokenizer)}
    config = CLIPConfig(text_config=text, vision_config=_VISION, projection_dim=24)
    _save(folder, lambda: CLIPModel(config))
    CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)


def write_siglip(folder: Path, tiny_sd: Path) -> None:
    """Write a `SiglipModel` with its processors; the tokenizer is Gemma's, as SigLIP 2's."""
    from transformers import AutoTokenizer, SiglipConfig, SiglipImageProcessorPil, SiglipModel

    from demo.tiny_models.language import write_gemma_tokenizer

    del tiny_sd
    folder.mkdir(parents=True, exist_ok=True)
    write_gemma_tokenizer(folder)
    vocabulary = len(AutoTokenizer.from_pretrained(folder))
    config = SiglipConfig(text_config={**_TEXT, "vocab_size": vocabulary}, vision_config=_VISION)
    _save(folder, lambda: SiglipModel(config))
    SiglipImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)


WRITERS: dict[str, Callable[[Path, Path], None]] = {
    "dino": write_dino,
    "clip": write_clip,
    "siglip": write_siglip,
}


def _save(folder: Path, make: Callable[[], Any]) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make()
        for weight in model.parameters():
            # The usual initial values are so small that all features are nearly equal.
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)


def changed_weights(folder: Path, target: Path) -> Path:
    """Copy a model, and change one of its settings of preprocessing."""
    shutil.copytree(folder, target)
    file = target / "preprocessor_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**settings, "rescale_factor": 0.002}), encoding="utf-8")
    return target
