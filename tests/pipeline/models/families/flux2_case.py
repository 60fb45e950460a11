"""The expected results of FLUX.2 klein and dev."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import Flux2KleinPipeline, Flux2Pipeline
from transformers import AutoTokenizer

from demo.tiny_models import make_tiny_flux2_dev, make_tiny_flux2_klein
from pipeline.trained_lora.worker.loader import MicroInput
from tests.pipeline.models.families.complete_job import Case

DOUBLE = ("img_attn_qkv", "img_attn_proj", "img_mlp_0", "img_mlp_2")
DOUBLE += tuple(layer.replace("img", "txt") for layer in DOUBLE)


class Flux2Case(Case):
    targets = (
        r"transformer_blocks\.\d+\.(attn\.(to|add)_[qkv](_proj)?|attn\.to_out\.0|attn\.to_add_out"
        r"|ff(_context)?\.linear_(in|out))|single_transformer_blocks\.\d+\.attn\.to_(qkv_mlp_proj|out)"
    )

    guidance: ClassVar[float | None]
    """Guidance scale of the transformer, or None if it takes none."""

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        return {"text_embedding": pipe.encode_prompt(caption)[0]}

    def latent(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        return pipe._encode_vae_image(pixels, generator=None)

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        """Call the transformer with one token per position; ids are (time, row, column, text index)."""
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
            guidance=None if self.guidance is None else torch.full((batch,), self.guidance),
        ).sample
        return tokens.transpose(1, 2).reshape(noisy.shape)

    def kohya_keys(self) -> set[str]:
        double = {f"lora_unet_double_blocks_{block}_{layer}" for block in range(2) for layer in DOUBLE}
        single = {f"lora_unet_single_blocks_{block}_linear{layer}" for block in range(2) for layer in (1, 2)}
        return double | single


class KleinCase(Flux2Case):
    pipeline_class = Flux2KleinPipeline
    guidance = None

    def make(self, folder: Path) -> None:
        make_tiny_flux2_klein(folder)

    def negative_prompt(self, pipe: Any, text: str) -> dict[str, Any]:
        """Return the negative prompt as embeddings, because the pipeline takes no text for it."""
        return {"negative_prompt_embeds": pipe.encode_prompt(text)[0]}


class DevCase(Flux2Case):
    pipeline_class = Flux2Pipeline
    guidance = 1.0

    def make(self, folder: Path) -> None:
        make_tiny_flux2_dev(folder)

    def pipeline(self, folder: Path, **parts: Any) -> Any:
        """Load the pipeline with a tokenizer only; its image processor needs torchvision."""
        pipe = Flux2Pipeline.from_pretrained(folder, tokenizer=None, **parts)
        pipe.register_modules(tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer"))
        return pipe
