"""FLUX.2 klein: a Qwen3 language model, a transformer over patches of a VAE of 32 channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.models.families.base import Conditions
from pipeline.models.families.flux2_blocks import TOKENS, Flux2Blocks
from pipeline.models.families.language import chat

if TYPE_CHECKING:
    from torch import Tensor, nn


class Flux2Klein(Flux2Blocks):
    """FLUX.2 klein, base and distilled."""

    name = "FLUX.2 klein"
    pipeline_classes = ("Flux2KleinPipeline",)
    components: ClassVar[Mapping[str, str]] = {
        "vae": "diffusers.AutoencoderKLFlux2",
        "tokenizer": "transformers.Qwen2TokenizerFast",
        "text_encoder": "transformers.Qwen3ForCausalLM",
        "transformer": "diffusers.Flux2Transformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    }
    text_method = "qwen3 chat three layers padded, 1"
    guidance_scale = 4.0

    def token_limits(self) -> dict[str, int]:
        """The pipeline's 512."""
        return {"tokenizer": TOKENS}

    def modelspec_architecture(self) -> str:
        """The one name for all sizes."""
        return "flux-2-klein"

    def tokenized(self, encoders: Any, caption: str) -> str:
        """In the chat template, not thinking, as the pipeline has it."""
        return chat(encoders.tokenizer, caption, enable_thinking=False)

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        """`Flux2KleinPipeline.encode_prompt`."""
        embedding, _ = encoders.encode_prompt(
            caption, device=encoders.text_encoder.device, max_sequence_length=TOKENS
        )
        return {"text_embedding": embedding}

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        """The transformer's sample, without a guidance."""
        return self.sample(denoiser, noisy, timesteps, conditions["text_embedding"], guidance=None)

    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], empty_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Guided away from the empty caption, where the model is not distilled."""
        return {
            "prompt_embeds": text["text_embedding"],
            "negative_prompt_embeds": empty_text["text_embedding"],
        }
