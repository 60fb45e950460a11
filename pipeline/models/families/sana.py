"""Sana: a Gemma 2 language model, a linear transformer, a deep-compression autoencoder of factor 32."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

from pipeline.models.families.base import Conditions, Posterior
from pipeline.models.families.language import LanguageTransformer, own_tokens
from pipeline.models.families.solver_schedule import SolverSchedule

if TYPE_CHECKING:
    from torch import Tensor, nn

_TOKENS = 300
"""`max_sequence_length` of the pipeline: the first token of its instruction, and the caption's."""


class Sana(SolverSchedule, LanguageTransformer):
    """Sana, whose captions are told to the language model behind the pipeline's own instruction."""

    name = "Sana"
    pipeline_classes = ("SanaPipeline",)
    components: ClassVar[Mapping[str, str]] = {
        "vae": "diffusers.AutoencoderDC",
        "tokenizer": "transformers.GemmaTokenizerFast",
        "text_encoder": "transformers.Gemma2Model",
        "transformer": "diffusers.SanaTransformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    }
    latent_method = "autoencoder-dc scaled, 1"
    text_method = "gemma2 instructed last hidden state unpadded, 2"
    guidance_scale = 4.5

    @property
    def factor(self) -> int:
        """Two for each level of the autoencoder but the first: 32."""
        return 2 ** (len(self.vae_config["encoder_block_out_channels"]) - 1)

    def token_limits(self) -> dict[str, int]:
        """The pipeline's 300, its instruction not included."""
        return {"tokenizer": _TOKENS}

    def limit_of(self, encoders: Any, role: str) -> int:
        """As the pipeline computes it, its instruction included."""
        return len(encoders.tokenizer.encode(_instruction(encoders))) + _TOKENS - 2

    def tokenized(self, encoders: Any, caption: str) -> str:
        """Behind the pipeline's instruction, in small letters, as the pipeline has it."""
        return _instruction(encoders) + caption.lower()

    def modelspec_architecture(self) -> str:
        """The one name for all sizes."""
        return "sana"

    def lora_targets(self) -> list[str]:
        """Query, key, value and output of each attention, self and cross."""
        return ["to_q", "to_k", "to_v", "to_out.0"]

    def kohya_loads(self) -> bool:
        """Diffusers reads no kohya files for Sana."""
        return False

    def posterior(self, vae: nn.Module, pixels: Tensor) -> Posterior:
        """The autoencoder's only answer, without a deviation."""
        import torch

        parameter = next(vae.parameters())
        with torch.inference_mode():
            latent = cast("Any", vae).encode(pixels.to(parameter.device, parameter.dtype)).latent.float()
        return Posterior(latent, torch.zeros_like(latent))

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        """`SanaPipeline.encode_prompt` as the pipeline calls it; the empty caption as its negative prompt."""
        embedding, mask, empty, empty_mask = encoders.encode_prompt(
            caption,
            do_classifier_free_guidance=not caption,
            device=encoders.text_encoder.device,
            max_sequence_length=_TOKENS,
            complex_human_instruction=_instructions(encoders),
        )
        if not caption:
            embedding, mask = empty, empty_mask
        return {"text_embedding": own_tokens(embedding, mask)}

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        """The transformer's sample."""
        return denoiser(
            noisy,
            encoder_hidden_states=conditions["text_embedding"],
            encoder_attention_mask=conditions["text_mask"],
            timestep=timesteps * float(self.denoiser_config.get("timestep_scale", 1.0)),
            return_dict=False,
        )[0]

    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], empty_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Guided away from the empty caption, in the very size that is asked for."""
        return {
            "prompt_embeds": text["text_embedding"],
            "prompt_attention_mask": text["text_mask"],
            "negative_prompt": None,
            "negative_prompt_embeds": empty_text["text_embedding"],
            "negative_prompt_attention_mask": empty_text["text_mask"],
            "use_resolution_binning": False,
        }


def _instructions(encoders: Any) -> list[str]:
    """Lines that the pipeline puts before a caption, unless it is told others."""
    return list(inspect.signature(type(encoders).__call__).parameters["complex_human_instruction"].default)


def _instruction(encoders: Any) -> str:
    return "\n".join(_instructions(encoders))
