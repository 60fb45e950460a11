"""Krea 2: twelve layers of a Qwen3-VL side by side, a single-stream transformer, Qwen-Image's VAE."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.errors import FamilyError
from pipeline.models.families.base import Conditions, Layer, Shapes
from pipeline.models.families.language import own_tokens
from pipeline.models.families.qwen_latents import PATCH, QwenLatents

if TYPE_CHECKING:
    from torch import Tensor, nn

_TOKENS = 512
"""`max_sequence_length` of the pipeline: the caption's, and what its template has behind it."""

_TEMPLATE_TOKENS, _SUFFIX_TOKENS = 34, 5
"""Of the pipeline's template before the caption, which are dropped, and behind it."""

_LAYERS = (2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35)
"""Hidden states of which the pipeline takes unless its index names others."""

_DISTILLED_SHIFT = 1.15
"""Of the pipeline, whatever the size."""

_BLOCK = re.compile(r"(transformer_blocks|text_fusion\.(?:layerwise|refiner)_blocks)\.(\d+)\.(.+)")
_ORIGINAL = {
    "attn.to_q": "attn.wq",
    "attn.to_k": "attn.wk",
    "attn.to_v": "attn.wv",
    "attn.to_out.0": "attn.wo",
    "attn.to_gate": "attn.gate",
    "ff.gate": "mlp.gate",
    "ff.up": "mlp.up",
    "ff.down": "mlp.down",
}
"""Modules of diffusers' blocks to Krea's."""

_PROJECTOR = "text_fusion.projector"
"""Beside the blocks; joins the layers of the language model."""


class Krea2(QwenLatents):
    """Krea 2, base and distilled; padding stands between a caption and its template's end, and is masked."""

    name = "Krea 2"
    pipeline_classes = ("Krea2Pipeline",)
    components: ClassVar[Mapping[str, str]] = {
        "vae": "diffusers.AutoencoderKLQwenImage",
        "tokenizer": "transformers.AutoTokenizer",
        "text_encoder": "transformers.Qwen3VLModel",
        "transformer": "diffusers.Krea2Transformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    }
    text_method = "qwen3-vl template layers unpadded, 1"
    guidance_scale = 4.5

    @property
    def layers(self) -> tuple[int, ...]:
        """Of the language model, whose hidden states the transformer sees."""
        return tuple(self.index.get("text_encoder_select_layers") or _LAYERS)

    def token_limits(self) -> dict[str, int]:
        """The pipeline's 512, what its template takes before the caption, and not what it takes behind."""
        return {"tokenizer": _TOKENS + _TEMPLATE_TOKENS - _SUFFIX_TOKENS}

    def text_shapes(self) -> Shapes:
        """Hidden states of all layers side by side."""
        return {"text_embedding": (_TOKENS, len(self.layers) * self.text_width())}

    def modelspec_architecture(self) -> str:
        """The one name."""
        return "krea-2"

    def timestep_facts(self) -> dict[str, Any]:
        """What the schedule's configuration says of the shift, and whether the model is distilled."""
        return {**super().timestep_facts(), "is_distilled": bool(self.index.get("is_distilled"))}

    def size_shift(self, scheduler: Any, latent_shape: tuple[int, int, int]) -> float:
        """The same for every size where the model is distilled."""
        if self.index.get("is_distilled"):
            return _DISTILLED_SHIFT
        return super().size_shift(scheduler, latent_shape)

    def lora_targets(self) -> list[str]:
        """Attention and feed-forward layers of all blocks, those that join the text's layers too."""
        return list(_ORIGINAL)

    def original_name(self, module: str) -> str:
        """The path in Krea's own code.

        Raises:
            FamilyError: The module is none of `lora_targets`, nor the one beside the blocks that join layers.
        """
        if module == _PROJECTOR:
            return module.replace("text_fusion", "txtfusion")
        found = _BLOCK.fullmatch(module)
        if not found or found[3] not in _ORIGINAL:
            raise FamilyError(
                f"the module {module} has no name in the original code's layout",
                where=str(self.folder / "transformer" / "config.json"),
                fix="adapt attention and feed-forward layers of blocks only",
            )
        blocks = found[1].replace("transformer_blocks", "blocks").replace("text_fusion", "txtfusion")
        return f"{blocks}.{found[2]}.{_ORIGINAL[found[3]]}"

    def kohya_layer(self, module: str) -> Layer:
        """`lora_unet_` and Krea's path with underscores."""
        return Layer("lora_unet_" + self.original_name(module).replace(".", "_"), (module,))

    def kohya_loads(self) -> bool:
        """Diffusers reads no kohya files for Krea 2."""
        return False

    def comfyui_key(self, module: str) -> str:
        """`diffusion_model.` and Krea's path, which ComfyUI's model has."""
        return f"diffusion_model.{self.original_name(module)}"

    def pipeline_options(self) -> dict[str, Any]:
        """The layers that the model's index names."""
        return {"text_encoder_select_layers": self.layers}

    def tokenized(self, encoders: Any, caption: str) -> str:
        """In the pipeline's template, as far as the caption goes."""
        return encoders.prompt_template_encode_prefix + caption

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        """`Krea2Pipeline.encode_prompt`: the caption's tokens and its template's last ones."""
        embedding, mask = encoders.encode_prompt(
            caption, device=encoders.text_encoder.device, max_sequence_length=_TOKENS
        )
        return {"text_embedding": own_tokens(embedding, mask).flatten(2)}

    def _layered(self, text: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(hidden states (B, T, layers, D), mask) as the transformer takes them."""
        return text["text_embedding"].unflatten(2, (len(self.layers), -1)), text["text_mask"].bool()

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        """The transformer's sample, of tokens that are the latent's patches, channels first."""
        from torch.nn.functional import fold, unfold

        text, mask = self._layered(conditions)
        height, width = noisy.shape[2:]
        grid = height // PATCH, width // PATCH
        tokens = denoiser(
            hidden_states=unfold(noisy, PATCH, stride=PATCH).transpose(1, 2),
            encoder_hidden_states=text,
            timestep=timesteps / self.num_timesteps,
            position_ids=self.pipeline_class().prepare_position_ids(text.shape[1], *grid, noisy.device),
            encoder_attention_mask=mask,
            return_dict=False,
        )[0]
        return fold(tokens.transpose(1, 2), (height, width), PATCH, stride=PATCH)

    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], empty_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Guided away from the empty caption."""
        arguments: dict[str, Any] = {}
        for sign, tensors in (("", text), ("negative_", empty_text)):
            arguments[f"{sign}prompt_embeds"], arguments[f"{sign}prompt_embeds_mask"] = self._layered(tensors)
        return arguments
