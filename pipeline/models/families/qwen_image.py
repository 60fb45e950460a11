"""Qwen-Image: a Qwen2.5-VL language model, a double-stream transformer, a video VAE of 16 channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.models.families.base import Conditions, Shapes
from pipeline.models.families.qwen_latents import PATCH, QwenLatents

if TYPE_CHECKING:
    from torch import Tensor, nn

_TOKENS = 512
"""`max_sequence_length` of the pipeline's call, template not included."""

_TEMPLATE_TOKENS = 34
"""Of the pipeline's template before the caption; they are dropped."""


class QwenImage(QwenLatents):
    """Qwen-Image; each caption's embedding is as long as the caption."""

    name = "Qwen-Image"
    pipeline_classes = ("QwenImagePipeline",)
    components: ClassVar[Mapping[str, str]] = {
        "vae": "diffusers.AutoencoderKLQwenImage",
        "tokenizer": "transformers.Qwen2TokenizerFast",
        "text_encoder": "transformers.Qwen2_5_VLForConditionalGeneration",
        "transformer": "diffusers.QwenImageTransformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    }
    text_method = "qwen2.5-vl template last hidden state unpadded, 2"
    guidance_scale = 4.0

    def token_limits(self) -> dict[str, int]:
        """The pipeline's 512, and what its template takes before the caption."""
        return {"tokenizer": _TOKENS + _TEMPLATE_TOKENS}

    def text_shapes(self) -> Shapes:
        """The hidden states of the caption's tokens; the template's are dropped."""
        return {"text_embedding": (_TOKENS, self.text_width())}

    def modelspec_architecture(self) -> str:
        """The one name."""
        return "qwen-image"

    def lora_targets(self) -> list[str]:
        """Attention and feed-forward layers of image and text; of the last block what the image sees.

        What that block makes of the text is dropped: the query that asks for it, and the layers behind, would
        never learn.
        """
        attention = ("to_q", "to_k", "to_v", "to_out.0", "add_k_proj", "add_v_proj")
        both = [*(f"attn.{end}" for end in attention), "img_mlp.net.0.proj", "img_mlp.net.2"]
        of_text = ("attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")
        blocks = range(int(self.denoiser_config["num_layers"]) - 1)
        return [*both, *(f"{block}.{layer}" for block in blocks for layer in of_text)]

    def tokenized(self, encoders: Any, caption: str) -> str:
        """In the pipeline's template."""
        return encoders.prompt_template_encode.format(caption)

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        """`QwenImagePipeline.encode_prompt`."""
        embedding, _ = encoders.encode_prompt(
            caption, device=encoders.text_encoder.device, max_sequence_length=_TOKENS
        )
        return {"text_embedding": embedding}

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        """The transformer's sample, of tokens that the pipeline's own functions pack and unpack."""
        pipeline, mask = self.pipeline_class(), conditions["text_mask"].bool()
        batch, channels, height, width = noisy.shape
        longest = int(mask.sum(dim=1).max())
        tokens = denoiser(
            hidden_states=pipeline._pack_latents(noisy, batch, channels, height, width),
            timestep=timesteps / self.num_timesteps,
            encoder_hidden_states=conditions["text_embedding"][:, :longest],
            encoder_hidden_states_mask=mask[:, :longest],
            img_shapes=[[(1, height // PATCH, width // PATCH)]] * batch,
            return_dict=False,
        )[0]
        size = (height * self.factor, width * self.factor)
        return pipeline._unpack_latents(tokens, *size, self.factor).squeeze(2)

    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], empty_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Guided away from the empty caption by `true_cfg_scale`, whose usual value is the guidance here."""
        arguments: dict[str, Any] = {"true_cfg_scale": self.guidance_scale}
        for sign, tensors in (("", text), ("negative_", empty_text)):
            longest = int(tensors["text_mask"].sum())
            arguments[f"{sign}prompt_embeds"] = tensors["text_embedding"][:, :longest]
            arguments[f"{sign}prompt_embeds_mask"] = tensors["text_mask"][:, :longest].bool()
        return arguments
