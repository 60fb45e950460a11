"""Lumina Image 2: a Gemma 2 language model, a single-stream transformer, a VAE of 16 channels."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.models.families.base import Conditions, Layer
from pipeline.models.families.language import LanguageTransformer, own_tokens

if TYPE_CHECKING:
    from torch import Tensor, nn

_TOKENS = 256
"""`max_sequence_length` of the pipeline, its system prompt included."""

_BLOCK = re.compile(r"((?:layers|noise_refiner|context_refiner)\.\d+)\.(.+)")
_ORIGINAL = {
    "attention.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "attention.out": ("attn.to_out.0",),
    **{f"feed_forward.w{number}": (f"feed_forward.linear_{number}",) for number in (1, 2, 3)},
}
"""Layers of Alpha-VLLM's blocks to diffusers' modules."""


class Lumina2(LanguageTransformer):
    """Lumina Image 2.0, whose captions follow the pipeline's system prompt."""

    name = "Lumina Image 2"
    pipeline_classes = ("Lumina2Pipeline",)
    components: ClassVar[Mapping[str, str]] = {
        "vae": "diffusers.AutoencoderKL",
        "tokenizer": "transformers.GemmaTokenizerFast",
        "text_encoder": "transformers.Gemma2Model",
        "transformer": "diffusers.Lumina2Transformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    }
    latent_method = "autoencoder-kl shifted scaled, 1"
    text_method = "gemma2 prompted penultimate unpadded, 2"
    guidance_scale = 4.0

    def token_limits(self) -> dict[str, int]:
        """The pipeline's 256."""
        return {"tokenizer": _TOKENS}

    def modelspec_architecture(self) -> str:
        """The one name."""
        return "lumina-2"

    def lora_targets(self) -> list[str]:
        """Attention and feed-forward layers of all blocks, the refiners' too."""
        return [module for modules in _ORIGINAL.values() for module in modules]

    def kohya_layer(self, module: str) -> Layer:
        """`lora_unet_` and Alpha-VLLM's layer: query, key and value are one."""
        block, layer, modules = self.layer_in_block(module, _BLOCK, _ORIGINAL)
        key = "lora_unet_" + f"{block}.{layer}".replace(".", "_")
        return Layer(key, tuple(f"{block}.{name}" for name in modules))

    def kohya_loads(self) -> bool:
        """Diffusers reads no kohya files for Lumina."""
        return False

    def comfyui_key(self, module: str) -> str:
        """Kohya's, which ComfyUI reads: its own names of diffusers' modules hold for Z-Image alone."""
        return self.kohya_layer(module).key

    def tokenized(self, encoders: Any, caption: str) -> str:
        """Behind the pipeline's system prompt."""
        return f"{encoders.system_prompt} <Prompt Start> {caption}"

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        """`Lumina2Pipeline.encode_prompt`; the empty caption as its negative prompt."""
        embedding, mask, empty, empty_mask = encoders.encode_prompt(
            caption,
            do_classifier_free_guidance=not caption,
            device=encoders.text_encoder.device,
            max_sequence_length=_TOKENS,
        )
        if not caption:
            embedding, mask = empty, empty_mask
        return {"text_embedding": own_tokens(embedding, mask)}

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        """The transformer's sample; time and answer run backwards."""
        return -denoiser(
            hidden_states=noisy,
            timestep=1.0 - timesteps / self.num_timesteps,
            encoder_hidden_states=conditions["text_embedding"],
            encoder_attention_mask=conditions["text_mask"].long(),
            return_dict=False,
        )[0]

    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], empty_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Guided away from the empty caption."""
        return {
            "prompt_embeds": text["text_embedding"],
            "prompt_attention_mask": text["text_mask"].long(),
            "negative_prompt_embeds": empty_text["text_embedding"],
            "negative_prompt_attention_mask": empty_text["text_mask"].long(),
        }
