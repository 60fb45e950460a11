"""Ideogram 4: thirteen layers of a Qwen3-VL, two single-stream transformers, FLUX.2's VAE.

The first transformer is trained. The second one, which sees no text, guides previews.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families.family import FamilySpec
from pipeline.models.families.parts.lora_keys import BlockNames, StackedKeys
from pipeline.models.families.parts.noise import FlowNoise
from pipeline.models.families.parts.text import LanguageModelText
from pipeline.models.families.parts.vae import PatchedLatents

SECOND_TRANSFORMER = "unconditional_transformer"

_BLOCKS = BlockNames(
    "layers",
    {
        "attention.qkv": ("attention.to_q", "attention.to_k", "attention.to_v"),
        "attention.o": ("attention.to_out.0",),
        **{f"feed_forward.w{number}": (f"feed_forward.w{number}",) for number in (1, 2, 3)},
    },
)


@dataclass(frozen=True)
class IdeogramNoise(FlowNoise):
    """Flow matching with the shift that the pipeline derives from the image size."""

    process: str = "families.ideogram4:IdeogramProcess"
    own_shift: str = "its pipeline computes the shift from the image size alone"

    def timestep_facts(self, model: ModelFolder) -> dict[str, Any]:
        # The pipeline does not read the scheduler's configuration.
        return {}


IDEOGRAM4 = FamilySpec(
    name="Ideogram 4",
    pipeline_classes=("Ideogram4Pipeline",),
    components={
        "vae": "diffusers.AutoencoderKLFlux2",
        "tokenizer": "transformers.AutoTokenizer",
        "text_encoder": "transformers.Qwen3VLModel",
        "transformer": "diffusers.Ideogram4Transformer2DModel",
        SECOND_TRANSFORMER: "diffusers.Ideogram4Transformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    },
    latents=PatchedLatents("autoencoder-kl-flux2 patched channels last normalised, 1", channels_last=True),
    text=LanguageModelText(
        "qwen3-vl chat thirteen layers, 1",
        "families.ideogram4:IdeogramConditioner",
        adds_special_tokens=False,
        tokens=2048,
        layers=13,
    ),
    noise=IdeogramNoise(),
    denoiser_call="families.ideogram4:IdeogramCall",
    drawing="families.ideogram4:IdeogramDrawing",
    # ComfyUI's model has Ideogram's stacked layers, so it reads kohya's keys.
    lora=StackedKeys(_BLOCKS.modules, blocks=(_BLOCKS,), comfyui_as_kohya=True),
    architecture="ideogram-4",
    kohya_version="ideogram4",
    guidance_scale=7.0,
    no_negative_prompts="its guidance uses a second transformer, which sees no text",
)
