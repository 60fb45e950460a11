from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diffusers import DDPMScheduler

from pipeline.families import detect
from pipeline.families.tiny import make_tiny_kolors
from pipeline.training.loader import MicroInput
from tests.pipeline.families.whole_job import Case

# diffusers' Euler schedule makes an array of a tensor in a way that numpy 2 calls old; its ChatGLM, which is
# imported no earlier than a test needs it, compiles a function in a way that torch calls old.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]

ATTENTIONS = {
    "down_blocks.1.attentions.0": "input_blocks.4.1",
    "down_blocks.1.attentions.1": "input_blocks.5.1",
    "mid_block.attentions.0": "middle_block.1",
    "up_blocks.0.attentions.0": "output_blocks.0.1",
    "up_blocks.0.attentions.1": "output_blocks.1.1",
    "up_blocks.0.attentions.2": "output_blocks.2.1",
}
LAYERS = [
    f"transformer_blocks.{block}.{attention}.{layer}"
    for block in range(2)
    for attention in ("attn1", "attn2")
    for layer in ("to_q", "to_k", "to_v", "to_out.0")
]


class KolorsCase(Case):
    targets: ClassVar[list[str]] = ["to_q", "to_k", "to_v", "to_out.0"]

    @property
    def pipeline_class(self) -> Any:
        from diffusers import KolorsPipeline

        return KolorsPipeline

    def make(self, folder: Path) -> None:
        make_tiny_kolors(folder)

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        embedding, _, pooled, _ = pipe.encode_prompt(caption, do_classifier_free_guidance=False)
        return {"text_embedding": embedding, "pooled_text_embedding": pooled}

    def latent(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        return pipe.vae.encode(pixels).latent_dist.mean * pipe.vae.config.scaling_factor

    def noisy(self, pipe: Any, micro: MicroInput) -> torch.Tensor:
        return DDPMScheduler.from_config(pipe.scheduler.config).add_noise(
            micro.latent, micro.noise, micro.timesteps
        )

    def target(self, micro: MicroInput) -> torch.Tensor:
        return micro.noise

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        """Each sample for itself, its time ids by the pipeline's own function."""
        answers = []
        for index in range(len(noisy)):
            original, crop, target = (
                tuple(micro.conditions[name][index].tolist())
                for name in ("original_size_hw", "crop_top_left", "target_size_hw")
            )
            ids = pipe._get_add_time_ids(original, crop, target, torch.float32, 32)
            one = slice(index, index + 1)
            added = {"text_embeds": micro.conditions["pooled_text_embedding"][one], "time_ids": ids}
            text = micro.conditions["text_embedding"][one]
            answer = pipe.unet(noisy[one], micro.timesteps[one], text, added_cond_kwargs=added)
            answers.append(answer.sample)
        return torch.cat(answers)

    def kohya_keys(self) -> set[str]:
        modules = [f"{place}.{layer}" for place in ATTENTIONS for layer in LAYERS]
        return {f"lora_unet_{module.replace('.', '_')}" for module in modules}

    def comfyui_keys(self, modules: set[str]) -> set[str]:
        return {f"diffusion_model.{place}.{layer}" for place in ATTENTIONS.values() for layer in LAYERS}


def test_the_whole_job_equals_diffusers_and_its_files_change_the_picture(
    prove: Callable[[Case], None],
) -> None:
    prove(KolorsCase())


def test_what_a_caption_loses_is_told_in_characters_not_bytes(tmp_path: Path) -> None:
    """FAILURES C05."""
    make_tiny_kolors(tmp_path)
    family = detect(tmp_path)
    encoders = family.load_text_encoders("float32", "cpu")
    fits = "é" + " cat" * 252  # two marks, the first word's space, one letter: 256
    assert family.encode_caption(encoders, fits).num_cut == 0
    encoded = family.encode_caption(encoders, fits + " cup photo")
    assert (encoded.num_tokens, encoded.num_cut) == (258, 2)
    assert encoded.cut_from is not None
    assert (fits + " cup photo")[encoded.cut_from :].strip() == "cup photo"
