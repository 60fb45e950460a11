"""ERNIE-Image: a Mistral 3, a single-stream transformer, FLUX.2's VAE.

Captions are used as they are, without the model that rewrites prompts for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families.family import FamilySpec
from pipeline.models.families.parts.lora_keys import LoraKeys
from pipeline.models.families.parts.noise import FlowNoise
from pipeline.models.families.parts.text import LanguageModelText, Shapes
from pipeline.models.families.parts.vae import PatchedLatents


@dataclass(frozen=True)
class LimitedText(LanguageModelText):
    """Hidden states of captions of at most `tokens` tokens, or of the tokenizer's limit if it is lower."""

    def token_limits(self, model: ModelFolder) -> dict[str, int]:
        # The pipeline itself only has its tokenizer's limit, if any.
        return {"tokenizer": min(int(model.config("tokenizer")["model_max_length"]), self.tokens)}

    def shapes(self, model: ModelFolder) -> Shapes:
        return {"text_embedding": (self.max_length(model), self.hidden_size(model))}


ERNIE_IMAGE = FamilySpec(
    name="ERNIE-Image",
    pipeline_classes=("ErnieImagePipeline",),
    components={
        "vae": "diffusers.AutoencoderKLFlux2",
        "tokenizer": "transformers.AutoTokenizer",
        "text_encoder": "transformers.Mistral3Model",
        "transformer": "diffusers.ErnieImageTransformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    },
    # The pipeline has its own variance floor, regardless of the VAE's configuration.
    latents=PatchedLatents("autoencoder-kl-flux2 patched normalised by ernie, 1", variance_floor=1e-5),
    text=LimitedText(
        "mistral3 penultimate unpadded, 1", "families.ernie_image:ErnieConditioner", tokens=2048
    ),
    noise=FlowNoise(),
    denoiser_call="families.ernie_image:ErnieImageCall",
    lora=LoraKeys(
        [
            *(f"self_attention.{end}" for end in ("to_q", "to_k", "to_v", "to_out.0")),
            *("mlp.gate_proj", "mlp.up_proj", "mlp.linear_fc2"),
        ],
        comfyui_prefix="diffusion_model.",
    ),
    architecture="ernie-image",
    guidance_scale=4.0,
)
