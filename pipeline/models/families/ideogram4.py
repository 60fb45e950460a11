"""Ideogram 4: thirteen layers of a Qwen3-VL side by side, two single-stream transformers, FLUX.2's VAE."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.models.families.answered import AnsweredPrompts
from pipeline.models.families.base import Conditions, Layer
from pipeline.models.families.flux2_latents import Flux2Latents
from pipeline.models.families.language import chat

if TYPE_CHECKING:
    from torch import Tensor, nn

_TOKENS = 2048
"""`max_sequence_length` of the pipeline, chat template included."""

_NUM_LAYERS = 13
"""Of the language model, whose answers `encode_prompt` takes side by side."""

_PATCH = 2
_BASE_PX = 512
"""Edge of the picture for which the pipeline's schedule is not moved."""

_SPREAD = 1.5
"""`std` of the pipeline's schedule."""

_LOG_NOISE = -15.0, 18.0
"""Logarithms of the least and the greatest ratio of noise's variance to the signal's in its schedule."""

_SECOND = "unconditional_transformer"
_BLOCK = re.compile(r"(layers\.\d+)\.(.+)")
_ORIGINAL = {
    "attention.qkv": ("attention.to_q", "attention.to_k", "attention.to_v"),
    "attention.o": ("attention.to_out.0",),
    **{f"feed_forward.w{number}": (f"feed_forward.w{number}",) for number in (1, 2, 3)},
}
"""Layers of Ideogram's blocks to diffusers' modules."""


class Ideogram4(AnsweredPrompts, Flux2Latents):
    """Ideogram 4. Its first transformer is trained; the second, which is told no text, guides previews."""

    name = "Ideogram 4"
    pipeline_classes = ("Ideogram4Pipeline",)
    components: ClassVar[Mapping[str, str]] = {
        "vae": "diffusers.AutoencoderKLFlux2",
        "tokenizer": "transformers.AutoTokenizer",
        "text_encoder": "transformers.Qwen3VLModel",
        "transformer": "diffusers.Ideogram4Transformer2DModel",
        _SECOND: "diffusers.Ideogram4Transformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    }
    latent_method = "autoencoder-kl-flux2 patched channels last normalised, 1"
    text_method = "qwen3-vl chat thirteen layers, 1"
    guidance_scale = 7.0
    adds_marks = False

    def token_limits(self) -> dict[str, int]:
        """The pipeline's 2048."""
        return {"tokenizer": _TOKENS}

    def text_width(self) -> int:
        """Of the hidden states of thirteen layers."""
        return _NUM_LAYERS * super().text_width()

    def modelspec_architecture(self) -> str:
        """The one name."""
        return "ideogram-4"

    def timestep_facts(self) -> dict[str, Any]:
        """Nothing: the pipeline passes over what the schedule's configuration says."""
        return {}

    def shift_sigma(self, scheduler: Any, sigma: Tensor, latent_shape: tuple[int, int, int]) -> Tensor:
        """As the pipeline's schedule: levels drawn logit-normally come to lie as dense as its steps."""
        import torch

        pixels = self.size_multiple() ** 2 * latent_shape[1] * latent_shape[2]
        mu = 0.5 * math.log(pixels / _BASE_PX**2)
        low, high = (1.0 / (1.0 + math.exp(-0.5 * ratio)) for ratio in _LOG_NOISE)
        return torch.sigmoid(mu + _SPREAD * torch.logit(sigma)).clamp(low, high)

    def lora_targets(self) -> list[str]:
        """Attention and feed-forward layers of all blocks."""
        return [module for modules in _ORIGINAL.values() for module in modules]

    def kohya_layer(self, module: str) -> Layer:
        """`lora_unet_` and Ideogram's layer: query, key and value are one."""
        block, layer, modules = self.layer_in_block(module, _BLOCK, _ORIGINAL)
        key = "lora_unet_" + f"{block}.{layer}".replace(".", "_")
        return Layer(key, tuple(f"{block}.{name}" for name in modules))

    def kohya_loads(self) -> bool:
        """Diffusers reads no kohya files for Ideogram."""
        return False

    def comfyui_key(self, module: str) -> str:
        """Kohya's, which ComfyUI reads: its model has Ideogram's layers."""
        return self.kohya_layer(module).key

    def normalise(self, raw_latent: Tensor) -> Tensor:
        """In patches (B, 4 C, h / 2, w / 2), channels last within one; each of their values for itself."""
        batch, channels, height, width = raw_latent.shape
        grid = raw_latent.view(batch, channels, height // _PATCH, _PATCH, width // _PATCH, _PATCH)
        patches = grid.permute(0, 3, 5, 1, 2, 4).reshape(batch, -1, height // _PATCH, width // _PATCH)
        mean, std = self.mean_and_deviation(patches.device)
        return (patches - mean) / std

    def denormalise(self, latent: Tensor) -> Tensor:
        """The raw latent (B, C, h, w), out of patches."""
        mean, std = self.mean_and_deviation(latent.device)
        batch, _, height, width = latent.shape
        grid = (latent * std + mean).view(batch, _PATCH, _PATCH, -1, height, width)
        return grid.permute(0, 3, 4, 1, 5, 2).reshape(batch, -1, height * _PATCH, width * _PATCH)

    def tokenized(self, encoders: Any, caption: str) -> str:
        """In the chat template, as the pipeline fills it."""
        return chat(encoders.tokenizer, [{"type": "text", "text": caption}])

    def count_tokens(self, encoders: Any, role: str, caption: str) -> tuple[int, int, int | None]:
        """(tokens of the caption, how many are beyond the limit, index of the first character that is).

        The pipeline refuses a caption that is too long; here its end is cut off, and the template's is not.
        """
        limit, before = self.limit_of(encoders, role), self.tokenized(encoders, "|").index("|")
        spans = self._spans(encoders, caption)
        if len(spans) <= limit:
            return len(spans), 0, None
        inside = sum(start < before + len(caption) for start, _ in spans)
        cut = spans[inside - (len(spans) - limit)][0] - before
        while (left := len(self._spans(encoders, caption[:cut]))) > limit:  # it is split in another way
            cut -= 1
        return len(spans), len(spans) - left, cut

    def _spans(self, encoders: Any, caption: str) -> list[tuple[int, int]]:
        """(first character, the one behind the last) of each token of the caption in its template."""
        options = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
        return encoders.tokenizer(self.tokenized(encoders, caption), **options)["offset_mapping"]

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        """`Ideogram4Pipeline.encode_prompt`, of as many tokens as there are, beside the smallest picture."""
        _, _, cut = self.count_tokens(encoders, "tokenizer", caption)
        kept = caption[:cut]
        length = len(self._spans(encoders, kept))
        states, *_ = encoders.encode_prompt(kept, 1, 1, length, encoders.text_encoder.device)
        return {"text_embedding": states[:, :length]}

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        """The transformer's sample of text and picture in one row; time and answer run backwards."""
        import torch

        text, lengths = conditions["text_embedding"], conditions["text_mask"].sum(dim=1).long().tolist()
        batch, longest, width = text.shape
        tokens = noisy.flatten(2).transpose(1, 2)
        states = text.new_zeros(batch, longest + tokens.shape[1], width)
        for at, length in enumerate(lengths):  # padding stands in front
            states[at, longest - length : longest] = text[at, :length]
        positions, segments, roles = self.pipeline_class()._prepare_ids(
            lengths, *noisy.shape[2:], longest, noisy.device
        )
        answer = denoiser(
            hidden_states=torch.cat([tokens.new_zeros(batch, longest, tokens.shape[2]), tokens], dim=1),
            timestep=1.0 - timesteps / self.num_timesteps,
            encoder_hidden_states=states,
            position_ids=positions,
            segment_ids=segments,
            indicator=roles,
            return_dict=False,
        )[0]
        return -answer[:, longest:].transpose(1, 2).reshape(noisy.shape)

    def load_pipeline(self, *, denoiser: nn.Module | None = None, dtype: str, device: str) -> Any:
        """With the second transformer, in the first one's number format."""
        pipeline = super().load_pipeline(denoiser=denoiser, dtype=dtype, device=device)
        second = self.load_component(_SECOND, str(pipeline.transformer.dtype).removeprefix("torch."), device)
        pipeline.register_modules(**{_SECOND: second})
        return pipeline

    def prompt_answer(
        self,
        pipeline: Any,
        text: Mapping[str, Tensor],
        empty_text: Mapping[str, Tensor],
        asked: Mapping[str, Any],
    ) -> tuple[Any, ...]:
        """The caption's states with the picture's place behind them; the second transformer needs no text."""
        import torch

        states = text["text_embedding"][:, : asked["max_sequence_length"]]
        grid = asked["grid_h"], asked["grid_w"]
        place = states.new_zeros(1, math.prod(grid), states.shape[2])
        length = states.shape[1]
        ids = pipeline._prepare_ids([length], *grid, length, states.device)
        return torch.cat([states, place], dim=1), *ids

    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], empty_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """As many tokens as the caption has, and one guidance for all steps."""
        told = super().prompt_arguments(pipeline, text, empty_text)
        length = int(text["text_mask"].sum())
        return {**told, "max_sequence_length": length, "guidance_schedule": None}
