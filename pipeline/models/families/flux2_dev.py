"""FLUX.2 dev: klein's transformer with a guidance, told by a Mistral 3 that is given a system message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.models.families.base import Conditions
from pipeline.models.families.flux2_blocks import TOKENS, Flux2Blocks

if TYPE_CHECKING:
    from torch import Tensor, nn

_TRAINING_GUIDANCE = 1.0
"""Told to the transformer, whose guidance is distilled: at 1 the adapter learns no guidance of its own."""


class Flux2Dev(Flux2Blocks):
    """FLUX.2 dev.

    Of the language model's processor the tokenizer alone is read: captions need no more, and its other half,
    which is for images, needs torchvision.
    """

    name = "FLUX.2 dev"
    pipeline_classes = ("Flux2Pipeline",)
    components: ClassVar[Mapping[str, str]] = {
        "vae": "diffusers.AutoencoderKLFlux2",
        "tokenizer": "transformers.AutoTokenizer",
        "text_encoder": "transformers.Mistral3ForConditionalGeneration",
        "transformer": "diffusers.Flux2Transformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    }
    text_method = "mistral3 chat three layers padded, 1"
    guidance_scale = 4.0
    adds_marks = False

    def token_limits(self) -> dict[str, int]:
        """The pipeline's 512."""
        return {"tokenizer": TOKENS}

    def modelspec_architecture(self) -> str:
        """The one name."""
        return "flux-2-dev"

    def tokenized(self, encoders: Any, caption: str) -> str:
        """In the chat template, behind the pipeline's system message."""
        from diffusers.pipelines.flux2.pipeline_flux2 import format_input

        messages = format_input([caption], encoders.system_message)
        return encoders.tokenizer.apply_chat_template(messages, tokenize=False)[0]

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        """`Flux2Pipeline.encode_prompt`."""
        embedding, _ = encoders.encode_prompt(
            caption, device=encoders.text_encoder.device, max_sequence_length=TOKENS
        )
        return {"text_embedding": embedding}

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        """The transformer's sample, for a guidance of 1."""
        guidance = noisy.new_full((len(noisy),), _TRAINING_GUIDANCE)
        return self.sample(denoiser, noisy, timesteps, conditions["text_embedding"], guidance=guidance)

    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], empty_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """The caption alone: guidance is distilled."""
        return {"prompt_embeds": text["text_embedding"]}
