from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import Flux2Pipeline
from transformers import AutoTokenizer

from pipeline.families import detect
from pipeline.families.tiny import make_tiny_flux2_dev
from pipeline.training.loader import MicroInput
from tests.pipeline.families.whole_job import Case

DOUBLE = ("img_attn_qkv", "img_attn_proj", "img_mlp_0", "img_mlp_2")
DOUBLE += tuple(layer.replace("img", "txt") for layer in DOUBLE)


class DevCase(Case):
    pipeline_class = Flux2Pipeline
    targets = (
        r"transformer_blocks\.\d+\.(attn\.(to|add)_[qkv](_proj)?|attn\.to_out\.0|attn\.to_add_out"
        r"|ff(_context)?\.linear_(in|out))|single_transformer_blocks\.\d+\.attn\.to_(qkv_mlp_proj|out)"
    )

    def make(self, folder: Path) -> None:
        make_tiny_flux2_dev(folder)

    def pipeline(self, folder: Path, **parts: Any) -> Any:
        """Without its processor's half for images, which needs torchvision."""
        pipe = Flux2Pipeline.from_pretrained(folder, tokenizer=None, **parts)
        pipe.register_modules(tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer"))
        return pipe

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        return {"text_embedding": pipe.encode_prompt(caption)[0]}

    def latent(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        return pipe._encode_vae_image(pixels, generator=None)

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        """Tokens are rows of latent values; positions are (time, row, column, place in the text)."""
        batch, _, height, width = noisy.shape
        rows = [[0, row, column, 0] for row in range(height) for column in range(width)]
        text = micro.conditions["text_embedding"]
        places = [[0, 0, 0, place] for place in range(text.shape[1])]
        tokens = pipe.transformer(
            noisy.flatten(2).transpose(1, 2),
            text,
            micro.timesteps / 1000,
            torch.tensor([rows] * batch),
            torch.tensor([places] * batch),
            guidance=torch.ones(batch),
        ).sample
        return tokens.transpose(1, 2).reshape(noisy.shape)

    def kohya_keys(self) -> set[str]:
        double = {f"lora_unet_double_blocks_{block}_{layer}" for block in range(2) for layer in DOUBLE}
        single = {f"lora_unet_single_blocks_{block}_linear{layer}" for block in range(2) for layer in (1, 2)}
        return double | single


def test_the_whole_job_of_dev_equals_diffusers_and_its_files_change_the_picture(
    prove: Callable[[Case], None],
) -> None:
    prove(DevCase())


def test_what_a_caption_loses_is_counted_behind_the_system_message(tmp_path: Path) -> None:
    make_tiny_flux2_dev(tmp_path)
    family = detect(tmp_path)
    encoders = family.load_text_encoders("float32", "cpu")
    short = family.encode_caption(encoders, "a cat")
    assert short.num_cut == 0
    assert short.cut_from is None
    before = short.num_tokens - len(["a", " cat", "[/INST]"])
    for extra in (0, 1, 7):
        caption = "a" + " cat" * (512 - before - len(["a", "[/INST]"]) + extra)
        encoded = family.encode_caption(encoders, caption)
        assert (encoded.num_tokens, encoded.num_cut) == (512 + extra, extra)
        lost = " cat" * (extra - 1) if extra else None  # the first that is cut is the end mark
        assert encoded.cut_from == (None if lost is None else len(caption) - len(lost))
