"""CogView4: a GLM language model, a transformer told of sizes and crop, a VAE of 16 channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.models.families.base import Conditions
from pipeline.models.families.language import LanguageTransformer, unpadded

if TYPE_CHECKING:
    from torch import Tensor, nn

_TOKENS = 1024
"""`max_sequence_length` of the pipeline."""


class CogView4(LanguageTransformer):
    """CogView4; each caption's embedding is as long as the caption, rounded up to 16."""

    name = "CogView4"
    pipeline_classes = ("CogView4Pipeline",)
    components: ClassVar[Mapping[str, str]] = {
        "vae": "diffusers.AutoencoderKL",
        "tokenizer": "transformers.PreTrainedTokenizerFast",
        "text_encoder": "transformers.GlmModel",
        "transformer": "diffusers.CogView4Transformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    }
    latent_method = "autoencoder-kl shifted scaled, 1"
    text_method = "glm penultimate unpadded, 2"
    guidance_scale = 5.0

    def token_limits(self) -> dict[str, int]:
        """The pipeline's 1024."""
        return {"tokenizer": _TOKENS}

    def modelspec_architecture(self) -> str:
        """The one name."""
        return "cogview-4"

    def lora_targets(self) -> list[str]:
        """Query, key, value and output of each attention."""
        return ["attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0"]

    def kohya_loads(self) -> bool:
        """Diffusers reads no kohya files for CogView4."""
        return False

    def size_shift(self, scheduler: Any, latent_shape: tuple[int, int, int]) -> float:
        """As the pipeline computes it, with the root of the number of tokens."""
        from diffusers.pipelines.cogview4.pipeline_cogview4 import calculate_shift

        config = scheduler.config
        return calculate_shift(
            self.num_tokens(latent_shape),
            config.get("base_image_seq_len", 256),
            config.get("base_shift", 0.25),
            config.get("max_shift", 0.75),
        )

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        """`CogView4Pipeline.encode_prompt`."""
        embedding, _ = encoders.encode_prompt(
            caption,
            do_classifier_free_guidance=False,
            device=encoders.text_encoder.device,
            max_sequence_length=_TOKENS,
        )
        return {"text_embedding": embedding}

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        """The transformer's sample, for text and geometry.

        One call a sample: the transformer knows no mask that hides padding from the others.
        """
        import torch

        texts = unpadded(conditions["text_embedding"], conditions["text_mask"])
        answers: list[Tensor] = []
        for index, text in enumerate(texts):
            one = slice(index, index + 1)
            sizes = {
                name: conditions[condition][one].float()
                for name, condition in (
                    ("original_size", "original_size_hw"),
                    ("target_size", "target_size_hw"),
                    ("crop_coords", "crop_top_left"),
                )
            }
            answer = denoiser(
                hidden_states=noisy[one],
                encoder_hidden_states=text[None],
                timestep=timesteps[one],
                **sizes,
                return_dict=False,
            )
            answers.append(answer[0])
        return torch.cat(answers)

    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], empty_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Guided away from the empty caption."""
        prompt, negative = (
            unpadded(tensors["text_embedding"], tensors["text_mask"])[0].unsqueeze(0)
            for tensors in (text, empty_text)
        )
        return {"prompt_embeds": prompt, "negative_prompt_embeds": negative}
