"""Kolors: a ChatGLM language model, Stable Diffusion XL's UNet and VAE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.models.families.base import Shapes
from pipeline.models.families.sized_unet import SizedUNet

if TYPE_CHECKING:
    from torch import Tensor

_TOKENS = 256
"""`max_sequence_length` of the pipeline."""


class Kolors(SizedUNet):
    """Kolors, whose UNet sees what the language model makes of padding."""

    name = "Kolors"
    pipeline_classes = ("KolorsPipeline",)
    components: ClassVar[Mapping[str, str]] = {
        "vae": "diffusers.AutoencoderKL",
        "tokenizer": "diffusers.pipelines.kolors.ChatGLMTokenizer",
        "text_encoder": "diffusers.pipelines.kolors.ChatGLMModel",
        "unet": "diffusers.UNet2DConditionModel",
        "scheduler": "diffusers.DDPMScheduler",
    }
    latent_method = "autoencoder-kl scaled, 1"
    text_method = "chatglm penultimate padded, 1"
    guidance_scale = 5.0

    def token_limits(self) -> dict[str, int]:
        """The pipeline's 256, two marks in front included."""
        return {"tokenizer": _TOKENS}

    def count_tokens(self, encoders: Any, role: str, caption: str) -> tuple[int, int, int | None]:
        """By the pieces of its SentencePiece model, which know where in the caption they begin."""
        tokenizer, limit = encoders.tokenizer, self.limit_of(encoders, role)
        pieces = tokenizer.tokenizer.sp_model.encode(caption, return_type="proto").pieces
        num_marks = len(tokenizer.get_prefix_tokens())
        num_tokens = num_marks + len(pieces)
        if num_tokens <= limit:
            return num_tokens, 0, None
        return num_tokens, num_tokens - limit, int(pieces[limit - num_marks].begin)

    def text_shapes(self) -> Shapes:
        """The last hidden states but one, padded to T, and the last token's last one."""
        width = int(self.config("text_encoder")["hidden_size"])
        return {"text_embedding": (_TOKENS, width), "pooled_text_embedding": (width,)}

    def modelspec_architecture(self) -> str:
        """The one name."""
        return "kolors"

    def embed(self, encoders: Any, caption: str | list[str]) -> dict[str, Tensor]:
        """`KolorsPipeline.encode_prompt`."""
        embedding, _, pooled, _ = encoders.encode_prompt(
            caption,
            device=encoders.text_encoder.device,
            do_classifier_free_guidance=False,
            max_sequence_length=_TOKENS,
        )
        return {"text_embedding": embedding, "pooled_text_embedding": pooled}
