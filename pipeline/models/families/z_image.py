"""Z-Image: a Qwen3 language model, a single-stream transformer, a VAE of 16 channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.models.families.base import Conditions
from pipeline.models.families.language import LanguageTransformer, chat, unpadded

if TYPE_CHECKING:
    from torch import Tensor, nn

_TOKENS = 512
"""`max_sequence_length` of the pipeline, template included."""


class ZImage(LanguageTransformer):
    """Z-Image and Z-Image-Turbo; each caption's embedding is as long as the caption."""

    name = "Z-Image"
    pipeline_classes = ("ZImagePipeline",)
    components: ClassVar[Mapping[str, str]] = {
        "vae": "diffusers.AutoencoderKL",
        "tokenizer": "transformers.Qwen2TokenizerFast",
        "text_encoder": "transformers.Qwen3Model",
        "transformer": "diffusers.ZImageTransformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    }
    latent_method = "autoencoder-kl shifted scaled, 1"
    text_method = "qwen3 chat penultimate unpadded, 2"
    guidance_scale = 4.0

    def size_multiple(self) -> int:
        """The VAE's factor times the edge of the transformer's patches."""
        return self.factor * int(self.denoiser_config["all_patch_size"][0])

    def token_limits(self) -> dict[str, int]:
        """The pipeline's 512."""
        return {"tokenizer": _TOKENS}

    def modelspec_architecture(self) -> str:
        """The one name for both."""
        return "z-image"

    def lora_targets(self) -> list[str]:
        """Attention and feed-forward layers of all blocks, the refiners' too."""
        attention = ["to_q", "to_k", "to_v", "to_out.0"]
        return [*(f"attention.{end}" for end in attention), *(f"feed_forward.w{n}" for n in (1, 2, 3))]

    def tokenized(self, encoders: Any, caption: str) -> str:
        """In the chat template, thinking, as the pipeline has it."""
        return chat(encoders.tokenizer, caption, enable_thinking=True)

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        """`ZImagePipeline.encode_prompt`."""
        embeddings, _ = encoders.encode_prompt(
            caption,
            device=encoders.text_encoder.device,
            do_classifier_free_guidance=False,
            max_sequence_length=_TOKENS,
        )
        return {"text_embedding": embeddings[0][None]}

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        """The transformer's sample of lists of latents and captions; time and answer run backwards."""
        import torch

        answers = denoiser(
            list(noisy.unsqueeze(2)),
            (self.num_timesteps - timesteps) / self.num_timesteps,
            unpadded(conditions["text_embedding"], conditions["text_mask"]),
            return_dict=False,
        )[0]
        return -torch.stack(list(answers)).squeeze(2)

    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], empty_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Guided away from the empty caption."""
        return {
            "prompt_embeds": unpadded(text["text_embedding"], text["text_mask"]),
            "negative_prompt_embeds": unpadded(empty_text["text_embedding"], empty_text["text_mask"]),
        }
