"""Krea 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import fold, unfold

from pipeline.models.families.krea2 import TOKENS, is_distilled, select_layers
from pipeline.models.worker.denoiser import Conditions, DenoiserCall, padding_mask
from pipeline.models.worker.noise import FlowProcess
from pipeline.models.worker.text import TextConditioner, own_tokens

_PATCH = 2

# The pipeline's shift for a distilled model, for pictures of any size.
_DISTILLED_SHIFT = 1.15


class Krea2Conditioner(TextConditioner):
    """Layers of a Qwen3-VL; the part of the template before the caption is dropped."""

    def prompt(self, encoders: Any, caption: str) -> str:
        # The pipeline cuts this text at the limit, and then appends the end of the template.
        return encoders.prompt_template_encode_prefix + caption

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        # Hidden states of the caption and of the end of the template.
        embedding, mask = self.encode_prompt(encoders, caption, max_sequence_length=TOKENS)
        return {"text_embedding": own_tokens(embedding, mask).flatten(2)}

    def prompt_tensors(self, text: Mapping[str, Any]) -> dict[str, Any]:
        layers = len(select_layers(self.family.model))
        states, mask = _by_layer(text, layers)
        return {"prompt_embeds": states, "prompt_embeds_mask": mask}


class Krea2Call(DenoiserCall):
    """The single-stream transformer over the latent's patches, channels first."""

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        text, _ = _by_layer(conditions, len(select_layers(self.family.model)))
        height, width = noisy.shape[2:]
        grid = height // _PATCH, width // _PATCH
        tokens = denoiser(
            hidden_states=unfold(noisy, _PATCH, stride=_PATCH).transpose(1, 2),
            encoder_hidden_states=text,
            timestep=timesteps / self.num_timesteps,
            position_ids=self.pipeline.prepare_position_ids(text.shape[1], *grid, noisy.device),
            encoder_attention_mask=padding_mask(conditions),
            return_dict=False,
        )[0]
        return fold(tokens.transpose(1, 2), (height, width), _PATCH, stride=_PATCH)


class Krea2Process(FlowProcess):
    """Flow matching with a shift that depends on the image size; a distilled model has a fixed one."""

    def size_shift(self, scheduler: Any, latent_shape: tuple[int, int, int]) -> float:
        if is_distilled(self.family.model):
            return _DISTILLED_SHIFT
        return super().size_shift(scheduler, latent_shape)


def _by_layer(text: Mapping[str, Tensor], layers: int) -> tuple[Tensor, Tensor]:
    """Return hidden states (B, T, layers, D) and the boolean mask, as the transformer takes them."""
    return text["text_embedding"].unflatten(2, (layers, -1)), text["text_mask"].bool()
