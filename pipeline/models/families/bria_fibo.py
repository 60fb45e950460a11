"""Bria FIBO: all layers of a SmolLM3, one for each block of its transformer, and Wan's VAE of 48 channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.models.families.answered import AnsweredPrompts
from pipeline.models.families.base import Conditions, Shapes
from pipeline.models.families.flux_blocks import block_targets, text_ids
from pipeline.models.families.frame_latents import FrameLatents
from pipeline.models.families.language import own_tokens

if TYPE_CHECKING:
    from torch import Tensor, nn

_TOKENS = 3000
"""`max_sequence_length` of the pipeline's call: captions for this model are long."""


class BriaFibo(AnsweredPrompts, FrameLatents):
    """Bria FIBO, trained on captions as they are: structured ones are the user's to write.

    Of the language model its body alone is read: what it would say next is not asked.
    """

    name = "Bria FIBO"
    pipeline_classes = ("BriaFiboPipeline",)
    components: ClassVar[Mapping[str, str]] = {
        "vae": "diffusers.AutoencoderKLWan",
        "tokenizer": "transformers.AutoTokenizer",
        "text_encoder": "transformers.SmolLM3Model",
        "transformer": "diffusers.BriaFiboTransformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    }
    latent_method = "autoencoder-kl-wan normalised, 1"
    text_method = "smollm3 all layers unpadded, 1"
    guidance_scale = 5.0

    @property
    def factor(self) -> int:
        """The VAE's `scale_factor_spatial`: 16."""
        return int(self.vae_config["scale_factor_spatial"])

    def token_limits(self) -> dict[str, int]:
        """The pipeline's 3000."""
        return {"tokenizer": _TOKENS}

    def text_shapes(self) -> Shapes:
        """Hidden states of all layers side by side, the embedding of the tokens first."""
        layers = int(self.config("text_encoder")["num_hidden_layers"]) + 1
        return {"text_embedding": (_TOKENS, layers * self.text_width())}

    def modelspec_architecture(self) -> str:
        """The one name."""
        return "bria-fibo"

    def lora_targets(self) -> list[str]:
        """Every linear layer of both kinds of block but the modulations."""
        return block_targets(int(self.denoiser_config["num_single_layers"]))

    def kohya_loads(self) -> bool:
        """Diffusers reads no kohya files for FIBO."""
        return False

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        """`BriaFiboPipeline.get_prompt_embeds`, of which its `encode_prompt` is made."""
        import torch

        _, layers, mask = encoders.get_prompt_embeds(
            caption, max_sequence_length=_TOKENS, device=encoders.text_encoder.device
        )
        return {"text_embedding": own_tokens(torch.cat(layers, dim=2), mask)}

    def _layered(self, text: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        """(the last two layers side by side, all layers) (B, T, D) each."""
        import torch

        layers = list(text["text_embedding"].split(self.text_width(), dim=2))
        return torch.cat([layers[-1], layers[-2]], dim=2), layers

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        """The transformer's sample; blocks beyond the text's layers are told the last of these."""
        import torch

        pipeline, mask = self.pipeline_class(), conditions["text_mask"].bool()
        batch, channels, height, width = noisy.shape
        text, layers = self._layered(conditions)
        blocks = int(self.denoiser_config["num_layers"]) + int(self.denoiser_config["num_single_layers"])
        seen = torch.cat([mask, mask.new_ones(batch, height * width)], dim=1)
        tokens = denoiser(
            hidden_states=pipeline._pack_latents_no_patch(noisy, batch, channels, height, width),
            timestep=timesteps,
            encoder_hidden_states=text,
            text_encoder_layers=layers[-blocks:] + layers[-1:] * (blocks - len(layers)),
            joint_attention_kwargs={"attention_mask": seen[:, None, None]},
            txt_ids=text_ids(text),
            img_ids=pipeline._prepare_latent_image_ids(batch, height, width, noisy.device, noisy.dtype),
            return_dict=False,
        )[0]
        return pipeline._unpack_latents_no_patch(tokens, height, width, 1)

    def prompt_answer(
        self,
        pipeline: Any,
        text: Mapping[str, Tensor],
        empty_text: Mapping[str, Tensor],
        asked: Mapping[str, Any],
    ) -> tuple[Any, ...]:
        """Guided away from the empty caption."""
        (own, own_layers), (empty, empty_layers) = (self._layered(each) for each in (text, empty_text))
        masks = text["text_mask"], empty_text["text_mask"]
        return own, empty, text_ids(own)[None], *masks, own_layers, empty_layers
