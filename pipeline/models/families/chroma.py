"""Chroma: T5 alone, a transformer after FLUX.1's without guidance, a VAE of 16 channels."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

from pipeline.models.families.base import Conditions, Layer, Shapes
from pipeline.models.families.flow_transformer import FlowTransformer
from pipeline.models.families.flux_blocks import (
    CONVERTED_WIDTH,
    PATCH,
    block_targets,
    kohya_block_layer,
    packed,
    text_ids,
    unpacked,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

_T5_TOKENS = 512
"""`max_sequence_length` of the pipeline."""


class Chroma(FlowTransformer):
    """Chroma1 base and HD.

    The mask lets a caption's tokens and one of padding through; but diffusers 0.42 adds it to the attention's
    scores, which raises those tokens and does not hide the others: all of them have to be there.
    """

    name = "Chroma"
    pipeline_classes = ("ChromaPipeline",)
    components: ClassVar[Mapping[str, str]] = {
        "vae": "diffusers.AutoencoderKL",
        "tokenizer": "transformers.T5TokenizerFast",
        "text_encoder": "transformers.T5EncoderModel",
        "transformer": "diffusers.ChromaTransformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    }
    latent_method = "autoencoder-kl shifted scaled, 1"
    text_method = "t5 masked padded with mask, 1"
    guidance_scale = 5.0

    def size_multiple(self) -> int:
        """The VAE's factor times the edge of what is packed into a token: 16."""
        return self.factor * PATCH

    def token_limits(self) -> dict[str, int]:
        """The pipeline's 512."""
        return {"tokenizer": _T5_TOKENS}

    def text_shapes(self) -> Shapes:
        """T5's hidden states, padded to T, and which of them the mask names."""
        width = int(self.config("text_encoder")["d_model"])
        return {"text_embedding": (_T5_TOKENS, width), "text_mask": (_T5_TOKENS,)}

    def modelspec_architecture(self) -> str:
        """The one name for all of them."""
        return "chroma"

    def lora_targets(self) -> list[str]:
        """Every linear layer of both kinds of block; there are no modulations."""
        return block_targets(int(self.denoiser_config["num_single_layers"]))

    def kohya_layer(self, module: str) -> Layer:
        """As `kohya_block_layer`."""
        return kohya_block_layer(module, str(self.folder / "transformer" / "config.json"))

    def kohya_loads(self) -> bool:
        """Diffusers' loader knows the published width alone."""
        config = self.denoiser_config
        return int(config["num_attention_heads"]) * int(config["attention_head_dim"]) == CONVERTED_WIDTH

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        """`ChromaPipeline.encode_prompt`."""
        embedding, _, mask, *_ = encoders.encode_prompt(
            caption,
            device=encoders.text_encoder.device,
            do_classifier_free_guidance=False,
            max_sequence_length=_T5_TOKENS,
        )
        return {"text_embedding": embedding, "text_mask": mask}

    def recompute_activations(self, denoiser: nn.Module) -> None:
        """Each block for itself: diffusers 0.42 leaves the mask out where it recomputes single blocks."""
        from torch.utils.checkpoint import checkpoint

        model = cast("Any", denoiser)
        for block in (*model.transformer_blocks, *model.single_transformer_blocks):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        """The transformer's sample, of tokens that the pipeline's own functions pack, number and unpack."""
        import torch

        pipeline = self.pipeline_class()
        text, image = conditions["text_embedding"], packed(pipeline, noisy)
        seen = conditions["text_mask"].new_ones(image["hidden_states"].shape[:2])
        tokens = denoiser(
            **image,
            timestep=timesteps / self.num_timesteps,
            encoder_hidden_states=text,
            txt_ids=text_ids(text),
            attention_mask=torch.cat([conditions["text_mask"], seen], dim=1),
            return_dict=False,
        )[0]
        return unpacked(pipeline, tokens, noisy, self.factor)

    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], empty_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Guided away from the empty caption."""
        return {
            "prompt_embeds": text["text_embedding"],
            "prompt_attention_mask": text["text_mask"],
            "negative_prompt_embeds": empty_text["text_embedding"],
            "negative_prompt_attention_mask": empty_text["text_mask"],
        }
