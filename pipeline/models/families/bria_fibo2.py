"""Bria FIBO 2: fifteen layers of a Qwen3-VL, a single-stream transformer, the VAE of FLUX.2."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families.family import FamilySpec
from pipeline.models.families.parts.lora_keys import LoraKeys
from pipeline.models.families.parts.noise import FlowNoise
from pipeline.models.families.parts.references import FIBO2_REFERENCES
from pipeline.models.families.parts.text import LanguageModelText
from pipeline.models.families.parts.vae import PatchedLatents

NUM_BUNDLES = 5
"""Number of injection blocks; each reads a bundle of three layers of the language model."""

PERCEIVER_BUNDLE = 2
"""Index of the injection block with the bundle that the transformer's Perceiver reads too."""

_LAYERS_PER_BUNDLE = 3

# `tokenizer_max_length` of the pipeline, with template and images; captions for this model are long.
_TOKENS = 4096

_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")


@dataclass(frozen=True)
class BriaFibo2Text(LanguageModelText):
    """Hidden states of the caption in its template, each of unit size; a longer prompt loses its end."""

    def token_limits(self, model: ModelFolder) -> dict[str, int]:
        return {"processor": self.tokens}


def _max_patches(model: ModelFolder) -> int:
    # The axes are planes, one for each image, and rows and columns of tokens.
    return min(model.config("transformer")["axes_lens"][1:])


BRIA_FIBO2 = FamilySpec(
    name="Bria FIBO 2",
    pipeline_classes=("BriaFibo2Pipeline",),
    components={
        "vae": "diffusers.AutoencoderKLFlux2",
        # The complete processor would require torchvision, so its tokenizer and the PIL version of its image
        # processor are loaded.
        "processor": "transformers.AutoTokenizer",
        "text_encoder": "transformers.Qwen3VLForConditionalGeneration",
        "transformer": "diffusers.BriaFibo2Transformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    },
    latents=PatchedLatents("autoencoder-kl-flux2 patched normalised, 1", max_patches=_max_patches),
    text=BriaFibo2Text(
        "qwen3-vl fibo2 cleaned json, fifteen layers normalised unpadded, 1",
        "families.bria_fibo2:BriaFibo2Conditioner",
        tokens=_TOKENS,
        layers=NUM_BUNDLES * _LAYERS_PER_BUNDLE,
    ),
    noise=FlowNoise(),
    denoiser_call="families.bria_fibo2:BriaFibo2Call",
    lora=LoraKeys(
        [
            *(f"attention.{end}" for end in _ATTENTION),
            *(f"cross_attention.{end}" for end in _ATTENTION),
            *(f"feed_forward.w{number}" for number in (1, 2, 3)),
        ]
    ),
    architecture="bria-fibo-2",
    guidance_scale=5.0,
    drawing="families.bria_fibo2:BriaFibo2Drawing",
    references=FIBO2_REFERENCES,
)
