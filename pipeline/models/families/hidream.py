"""HiDream I1, full, dev and fast: two CLIPs, T5 and every layer of a Llama; a mixture-of-experts transformer.

The published models lack the Llama, which users set in `model.components`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.errors import BucketError, FamilyError
from pipeline.images.geometry import Size
from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families.family import FamilySpec
from pipeline.models.families.parts.lora_keys import LoraKeys
from pipeline.models.families.parts.noise import SolverFlowNoise
from pipeline.models.families.parts.text import Shapes, TextSpec
from pipeline.models.families.parts.vae import LatentSpec

TOKENS = 128
"""`max_sequence_length` of the pipeline, for all four encoders."""

_TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3", "tokenizer_4")
_USER_PROVIDED = ("tokenizer_4", "text_encoder_4")


@dataclass(frozen=True)
class HiDreamLatents(LatentSpec):
    """Latents that, unless they are square, must fit into the transformer's padded sequence."""

    def shape(self, model: ModelFolder, target: Size) -> tuple[int, int, int]:
        shape = super().shape(model, target)

        # The transformer pads the patches of images that are not square to the length of `max_resolution`.
        config = model.config("transformer")
        max_tokens = math.prod(config["max_resolution"]) // int(config["patch_size"]) ** 2
        if target.height != target.width and self.num_tokens(model, shape) > max_tokens:
            edge_px = round(math.sqrt(max_tokens)) * self.size_multiple(model)
            raise BucketError(
                f"target size {target.height}x{target.width} (height x width) is too large for this "
                "base model",
                where="buckets.resolution",
                fix=f"set it to at most {edge_px}: images that are not square may have {edge_px**2} pixels",
            )
        return shape


@dataclass(frozen=True)
class FourEncoderText(TextSpec):
    """The hidden states of T5 and of all Llama layers, padded, and both CLIPs' projections."""

    def roles(self, model: ModelFolder, components: Iterable[str]) -> tuple[str, ...]:
        """Raise FamilyError if the recipe does not set the Llama, and return all tokenizers and encoders."""
        for role in _USER_PROVIDED:
            if not model.has(role):
                raise FamilyError(
                    f"HiDream's published models lack {role}: you provide a Llama 3.1",
                    where=f"model.components.{role}",
                    fix="set model.components.tokenizer_4 and model.components.text_encoder_4 to "
                    "meta-llama/Llama-3.1-8B-Instruct, or to a folder with a downloaded copy",
                )
        return super().roles(model, components)

    def token_limits(self, model: ModelFolder) -> dict[str, int]:
        return dict.fromkeys(_TOKENIZERS, TOKENS)

    def shapes(self, model: ModelFolder) -> Shapes:
        llama = model.config("text_encoder_4")
        clips = ("text_encoder", "text_encoder_2")
        return {
            "text_embedding": (TOKENS, int(model.config("text_encoder_3")["d_model"])),
            "llama_embeddings": (int(llama["num_hidden_layers"]), TOKENS, int(llama["hidden_size"])),
            "pooled_text_embedding": (sum(int(model.config(role)["projection_dim"]) for role in clips),),
        }


HIDREAM = FamilySpec(
    name="HiDream",
    pipeline_classes=("HiDreamImagePipeline",),
    components={
        "vae": "diffusers.AutoencoderKL",
        "tokenizer": "transformers.CLIPTokenizer",
        "tokenizer_2": "transformers.CLIPTokenizer",
        "tokenizer_3": "transformers.T5TokenizerFast",
        "tokenizer_4": "transformers.PreTrainedTokenizerFast",
        "text_encoder": "transformers.CLIPTextModelWithProjection",
        "text_encoder_2": "transformers.CLIPTextModelWithProjection",
        "text_encoder_3": "transformers.T5EncoderModel",
        "text_encoder_4": "transformers.LlamaForCausalLM",
        "transformer": "diffusers.HiDreamImageTransformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    },
    latents=HiDreamLatents("autoencoder-kl shifted scaled, 1"),
    text=FourEncoderText(
        "two clips pooled, t5 and llama layers padded, 1", "families.hidream:FourEncoderConditioner"
    ),
    noise=SolverFlowNoise(),
    denoiser_call="families.hidream:HiDreamCall",
    drawing="families.hidream:HiDreamDrawing",
    lora=LoraKeys([f"attn1.to_{end}{side}" for side in ("", "_t") for end in ("q", "k", "v", "out")]),
    architecture="hidream-i1",
    guidance_scale=5.0,
)
