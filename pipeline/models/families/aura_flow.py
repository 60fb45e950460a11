"""AuraFlow: a multilingual T5, a transformer of joint and single blocks, a VAE of 4 channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import isqrt
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.errors import BucketError
from pipeline.images.geometry import Size
from pipeline.models.diffusers_folder import read_json
from pipeline.models.families.base import Conditions, Shapes
from pipeline.models.families.flow_transformer import FlowTransformer
from pipeline.models.families.language import own_tokens

if TYPE_CHECKING:
    from torch import Tensor, nn

_T5_TOKENS = 256
"""`max_sequence_length` of the pipeline."""


class AuraFlow(FlowTransformer):
    """AuraFlow, whose captions are filled up with zeros, in front where its tokenizer pads there."""

    name = "AuraFlow"
    pipeline_classes = ("AuraFlowPipeline",)
    components: ClassVar[Mapping[str, str]] = {
        "vae": "diffusers.AutoencoderKL",
        "tokenizer": "transformers.LlamaTokenizerFast",
        "text_encoder": "transformers.UMT5EncoderModel",
        "transformer": "diffusers.AuraFlowTransformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    }
    latent_method = "autoencoder-kl scaled, 1"
    text_method = "umt5 masked unpadded, 2"
    text_padding = "zeros"
    guidance_scale = 3.5

    def latent_shape(self, target: Size) -> tuple[int, int, int]:
        """(C, h, w), each edge divided by the VAE's factor.

        Raises:
            BucketError: An edge is beyond the transformer's table of positions, which is a square.
        """
        shape = super().latent_shape(target)
        largest = isqrt(int(self.denoiser_config["pos_embed_max_size"])) * self.size_multiple()
        if max(target) > largest:
            raise BucketError(
                f"a target size of {target.height}x{target.width} is too large for this base model",
                where="buckets.resolution",
                fix=f"lower it, or narrow the aspect ratios: no edge may be longer than {largest} px",
            )
        return shape

    def token_limits(self) -> dict[str, int]:
        """The pipeline's 256."""
        return {"tokenizer": _T5_TOKENS}

    def text_shapes(self) -> Shapes:
        """T5's hidden states of the caption's tokens."""
        return {"text_embedding": (_T5_TOKENS, int(self.config("text_encoder")["d_model"]))}

    def modelspec_architecture(self) -> str:
        """The one name."""
        return "auraflow"

    def lora_targets(self) -> list[str]:
        """Query, key, value and output of each attention, of image and text."""
        ends = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
        return [f"attn.{end}" for end in ends]

    def kohya_loads(self) -> bool:
        """Diffusers reads no kohya files for AuraFlow."""
        return False

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        """`AuraFlowPipeline.encode_prompt`."""
        embedding, mask, *_ = encoders.encode_prompt(
            caption,
            do_classifier_free_guidance=False,
            device=encoders.text_encoder.device,
            max_sequence_length=_T5_TOKENS,
        )
        return {"text_embedding": own_tokens(embedding, mask.reshape(embedding.shape)[..., 0])}

    @cached_property
    def _pads_in_front(self) -> bool:
        config = read_json(self.place("tokenizer") / "tokenizer_config.json")
        return config.get("padding_side", "left") == "left"

    def stack_texts(self, texts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """With as many zeros as fill the pipeline's length, on the side where its tokenizer pads."""
        import torch
        from torch.nn.functional import pad

        padded: list[Tensor] = []
        for text in texts:
            lacking = _T5_TOKENS - len(text["text_embedding"])
            rows = (lacking, 0) if self._pads_in_front else (0, lacking)
            padded.append(pad(text["text_embedding"], (0, 0, *rows)))
        return {"text_embedding": torch.stack(padded)}

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        """The transformer's sample."""
        return denoiser(
            noisy,
            encoder_hidden_states=conditions["text_embedding"],
            timestep=timesteps / self.num_timesteps,
            return_dict=False,
        )[0]

    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], empty_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Guided away from the empty caption; the pipeline asks for masks, and uses none of them."""
        embeddings = {"": text["text_embedding"], "negative_": empty_text["text_embedding"]}
        arguments = {f"{sign}prompt_embeds": embedding for sign, embedding in embeddings.items()}
        masks = {
            f"{sign}prompt_attention_mask": embedding.new_ones(embedding.shape[:2])
            for sign, embedding in embeddings.items()
        }
        return {**arguments, **masks}
