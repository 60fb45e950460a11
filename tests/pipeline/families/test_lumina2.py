from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import Lumina2Pipeline

from pipeline.families.tiny import make_tiny_lumina2
from pipeline.training.loader import MicroInput
from tests.pipeline.families.whole_job import Case

ORIGINAL = ("attention_qkv", "attention_out", "feed_forward_w1", "feed_forward_w2", "feed_forward_w3")
BLOCKS = ("layers_0", "layers_1", "noise_refiner_0", "context_refiner_0")


class Lumina2Case(Case):
    pipeline_class = Lumina2Pipeline
    targets: ClassVar[list[str]] = [
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *(f"feed_forward.linear_{number}" for number in (1, 2, 3)),
    ]

    def make(self, folder: Path) -> None:
        make_tiny_lumina2(folder)

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        embedding, mask, empty, empty_mask = pipe.encode_prompt(caption)
        if not caption:  # what pictures are guided away from
            embedding, mask = empty, empty_mask
        return {"text_embedding": embedding, "text_mask": mask}

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        """Each sample for itself, with its own tokens alone."""
        answers = []
        for index, text in enumerate(micro.conditions["text_embedding"]):
            length = int(micro.conditions["text_mask"][index].sum())
            time = 1 - micro.timesteps[index : index + 1] / 1000
            mask = torch.ones(1, length, dtype=torch.int64)
            answers.append(-pipe.transformer(noisy[index][None], time, text[None, :length], mask).sample)
        return torch.cat(answers)

    def kohya_keys(self) -> set[str]:
        return {f"lora_unet_{block}_{layer}" for block in BLOCKS for layer in ORIGINAL}

    def comfyui_keys(self, modules: set[str]) -> set[str]:
        return self.kohya_keys()


def test_the_whole_job_equals_diffusers_and_its_files_change_the_picture(
    prove: Callable[[Case], None],
) -> None:
    prove(Lumina2Case())
