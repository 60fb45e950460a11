"""Kandinsky 5, its image model: a Qwen2.5-VL and a pooled CLIP, a transformer for videos of one frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.errors import BucketError
from pipeline.images.geometry import Size
from pipeline.models.families.base import Conditions, Shapes
from pipeline.models.families.language import LanguageTransformer

if TYPE_CHECKING:
    from torch import Tensor, nn

_TOKENS = 512
"""`max_sequence_length` of the pipeline's call, template not included."""

_TEMPLATE_TOKENS = 40
"""Of the pipeline's template before the caption; they are dropped."""

_KEPT_AT_ONCE, _BEHIND = _TOKENS - 2, 2
"""Of what is too long the pipeline decodes the tokens from the first, all but so many at the end."""

_POSITIONS = 128
"""Of the transformer's tables, for rows and for columns of patches."""


class Kandinsky5(LanguageTransformer):
    """Kandinsky 5 for images. Its transformer takes no mask: each sample of a batch is predicted by itself.

    Of the language model's processor the tokenizer alone is read: captions need no more, and its other half,
    which is for images, needs torchvision.
    """

    name = "Kandinsky 5 (image)"
    pipeline_classes = ("Kandinsky5T2IPipeline",)
    components: ClassVar[Mapping[str, str]] = {
        "vae": "diffusers.AutoencoderKL",
        "tokenizer": "transformers.AutoTokenizer",
        "tokenizer_2": "transformers.CLIPTokenizer",
        "text_encoder": "transformers.Qwen2_5_VLForConditionalGeneration",
        "text_encoder_2": "transformers.CLIPTextModel",
        "transformer": "diffusers.Kandinsky5Transformer3DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    }
    latent_method = "autoencoder-kl scaled, 1"
    text_method = "qwen2.5-vl template unpadded and clip pooled, 1" + (", ftfy" if find_spec("ftfy") else "")
    guidance_scale = 3.5

    def size_multiple(self) -> int:
        """The VAE's factor times the edge of the transformer's patches: 16."""
        return self.factor * int(self.denoiser_config["patch_size"][1])

    def latent_shape(self, target: Size) -> tuple[int, int, int]:
        """(C, h, w), each edge divided by the VAE's factor.

        Raises:
            BucketError: An edge is beyond the transformer's tables of positions.
        """
        largest = _POSITIONS * self.size_multiple()
        if max(target) > largest:
            raise BucketError(
                f"a target size of {target.height}x{target.width} is too large for this base model",
                where="buckets.resolution",
                fix=f"lower it, or narrow the aspect ratios: no edge may be longer than {largest} px",
            )
        return super().latent_shape(target)

    def token_limits(self) -> dict[str, int]:
        """Qwen's alone, CLIP says little: the pipeline's 512, and its template's before the caption."""
        return {"tokenizer": _TOKENS + _TEMPLATE_TOKENS}

    def text_shapes(self) -> Shapes:
        """Qwen's hidden states of the caption's tokens, and CLIP's pooled output."""
        return {
            "text_embedding": (_TOKENS, self.text_width()),
            "pooled_text_embedding": (int(self.config("text_encoder_2")["hidden_size"]),),
        }

    def modelspec_architecture(self) -> str:
        """The one name."""
        return "kandinsky-5-image"

    def lora_targets(self) -> list[str]:
        """Attention, self and cross, and feed-forward layers of all blocks, those of the text too."""
        ends = ("to_query", "to_key", "to_value", "out_layer")
        attention = [f"{kind}_attention.{end}" for kind in ("self", "cross") for end in ends]
        return [*attention, "feed_forward.in_layer", "feed_forward.out_layer"]

    def kohya_loads(self) -> bool:
        """Diffusers reads no kohya files for Kandinsky."""
        return False

    def normalise(self, raw_latent: Tensor) -> Tensor:
        """Scaled as the pipelines do it, which ask for no shift."""
        return raw_latent * float(self.vae_config["scaling_factor"])

    def denormalise(self, latent: Tensor) -> Tensor:
        """The inverse, as the pipelines do it."""
        return latent / float(self.vae_config["scaling_factor"])

    def tokenized(self, encoders: Any, caption: str) -> str:
        """In the pipeline's template, with white space and HTML entities as the pipeline reads them."""
        from diffusers.pipelines.kandinsky5.pipeline_kandinsky_t2i import prompt_clean

        return encoders.prompt_template.format(prompt_clean(caption))

    def count_tokens(self, encoders: Any, role: str, caption: str) -> tuple[int, int, int | None]:
        """(tokens of the caption, how many are lost, index of the first character that is).

        Of a text with too many tokens the pipeline takes characters off the end, as many as a part of its
        tokens has; what is left it reads up to the limit. The index is that of the text as it reads it.
        """
        text, limit = self.tokenized(encoders, caption), self.limit_of(encoders, role)
        spans = self._spans(encoders.tokenizer, text)
        if len(spans) <= limit:
            return len(spans), 0, None
        tokens = encoders.tokenizer(text)["input_ids"][_TEMPLATE_TOKENS:-_BEHIND]
        end = len(text) - len(encoders.tokenizer.decode(tokens[_KEPT_AT_ONCE:]))
        left = self._spans(encoders.tokenizer, text[:end])
        end = left[limit][0] if len(left) > limit else end
        lost = sum(span_end > end for _, span_end in spans)
        return len(spans), lost, min(max(end - encoders.prompt_template.index("{}"), 0), len(caption))

    @staticmethod
    def _spans(tokenizer: Any, text: str) -> list[tuple[int, int]]:
        """(first character, the one behind the last) of each token."""
        return tokenizer(text, return_offsets_mapping=True, verbose=False)["offset_mapping"]

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        """`Kandinsky5T2IPipeline.encode_prompt`."""
        embedding, pooled, _ = encoders.encode_prompt(
            caption, device=encoders.text_encoder.device, max_sequence_length=_TOKENS
        )
        return {"text_embedding": embedding, "pooled_text_embedding": pooled}

    def stack_texts(self, texts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """With zeros behind the tokens of the shorter captions, and `text_mask` (B, T)."""
        import torch

        pooled = torch.stack([text["pooled_text_embedding"] for text in texts])
        return {**super().stack_texts(texts), "pooled_text_embedding": pooled}

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        """The transformer's sample: of videos of one frame, channels last, each with its own text alone."""
        import torch

        edge = self.size_multiple() // self.factor
        grid = (1, noisy.shape[2] // edge, noisy.shape[3] // edge)
        places = [torch.arange(count, device=noisy.device) for count in grid]
        answers: list[Tensor] = []
        for at, length in enumerate(conditions["text_mask"].sum(dim=1).long().tolist()):
            its = slice(at, at + 1)
            answer = denoiser(
                hidden_states=noisy[its].permute(0, 2, 3, 1)[:, None].contiguous(),
                encoder_hidden_states=conditions["text_embedding"][its, :length],
                pooled_projections=conditions["pooled_text_embedding"][its],
                timestep=timesteps[its],
                visual_rope_pos=places,
                text_rope_pos=torch.arange(length, device=noisy.device),
                return_dict=False,
            )
            answers.append(answer[:, 0].permute(0, 3, 1, 2))
        return torch.cat(answers)

    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], empty_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Guided away from the empty caption."""
        import torch

        arguments: dict[str, Any] = {}
        for sign, tensors in (("", text), ("negative_", empty_text)):
            length = int(tensors["text_mask"].sum())
            arguments[f"{sign}prompt_embeds_qwen"] = tensors["text_embedding"][:, :length]
            arguments[f"{sign}prompt_embeds_clip"] = tensors["pooled_text_embedding"]
            arguments[f"{sign}prompt_cu_seqlens"] = torch.tensor([0, length], dtype=torch.int32)
        return arguments

    def allow_size(self, pipeline: Any, size: Size) -> None:
        """The pipeline draws in sizes of its own: so it is made one of them."""
        pipeline.resolutions = [(size.width, size.height)]
