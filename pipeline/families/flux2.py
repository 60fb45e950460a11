"""FLUX.2 klein: a Qwen3 language model, a transformer over patches of a VAE of 32 channels."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.errors import FamilyError, ModelError
from pipeline.families.base import Conditions, Layer, Shapes
from pipeline.families.files import weight_files
from pipeline.families.flow_transformer import stacked
from pipeline.families.language import LanguageTransformer, chat
from pipeline.geometry import Size

if TYPE_CHECKING:
    from torch import Tensor, nn

_PATCH = 2
_TOKENS = 512
"""`max_sequence_length` of the pipeline, template included."""

_NUM_ENCODER_LAYERS = 3
"""Hidden states of which `encode_prompt` takes side by side."""

_DRAWING_STEPS = 50
"""Of the pipeline by default: the shift depends on it."""

_BLOCK = re.compile(r"(single_)?transformer_blocks\.(\d+)\.(.+)")
_DOUBLE = {
    "img_attn_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "img_attn_proj": ("attn.to_out.0",),
    "img_mlp_0": ("ff.linear_in",),
    "img_mlp_2": ("ff.linear_out",),
    "txt_attn_qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "txt_attn_proj": ("attn.to_add_out",),
    "txt_mlp_0": ("ff_context.linear_in",),
    "txt_mlp_2": ("ff_context.linear_out",),
}
_SINGLE = {"linear1": ("attn.to_qkv_mlp_proj",), "linear2": ("attn.to_out",)}
"""Layers of Black Forest Labs' blocks to diffusers' modules."""


class Flux2Klein(LanguageTransformer):
    """FLUX.2 klein, base and distilled."""

    name = "FLUX.2 klein"
    pipeline_classes = ("Flux2KleinPipeline",)
    components: ClassVar[Mapping[str, str]] = {
        "vae": "diffusers.AutoencoderKLFlux2",
        "tokenizer": "transformers.Qwen2TokenizerFast",
        "text_encoder": "transformers.Qwen3ForCausalLM",
        "transformer": "diffusers.Flux2Transformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    }
    latent_method = "autoencoder-kl-flux2 patched normalised, 1"
    text_method = "qwen3 chat three layers padded, 1"
    guidance_scale = 4.0

    def size_multiple(self) -> int:
        """The VAE's factor times the edge of what becomes one value: 16."""
        return self.factor * _PATCH

    def latent_shape(self, target: Size) -> tuple[int, int, int]:
        """(4 C, h / 2, w / 2): a latent is stored in patches, whose values are normalised each for itself."""
        channels, height, width = super().latent_shape(target)
        return channels * _PATCH**2, height // _PATCH, width // _PATCH

    def num_tokens(self, latent_shape: tuple[int, int, int]) -> int:
        """One a value of the patched latent."""
        return latent_shape[1] * latent_shape[2]

    def token_limits(self) -> dict[str, int]:
        """The pipeline's 512."""
        return {"tokenizer": _TOKENS}

    def text_shapes(self) -> Shapes:
        """Hidden states of three layers side by side, padded to T."""
        return {"text_embedding": (_TOKENS, _NUM_ENCODER_LAYERS * self.text_width())}

    def modelspec_architecture(self) -> str:
        """The one name for all sizes."""
        return "flux-2-klein"

    def lora_targets(self) -> list[str]:
        """Every linear layer of both kinds of block."""
        double = [module for modules in _DOUBLE.values() for module in modules]
        blocks = range(int(self.denoiser_config["num_single_layers"]))
        outs = [f"single_transformer_blocks.{block}.attn.to_out" for block in blocks]
        return [*double, "attn.to_qkv_mlp_proj", *outs]

    def kohya_layer(self, module: str) -> Layer:
        """`lora_unet_` and Black Forest Labs' layer: in double blocks query, key and value are one."""
        found = _BLOCK.fullmatch(module)
        layer = stacked(_SINGLE if found[1] else _DOUBLE, found[3]) if found else None
        if not found or not layer:
            raise FamilyError(
                f"the module {module} has no name in kohya's layout",
                where=str(self.folder / "transformer" / "config.json"),
                fix="adapt linear layers of transformer blocks only",
            )
        block = module.removesuffix(found[3])
        kind = "single" if found[1] else "double"
        modules = tuple(f"{block}{name}" for name in layer[1])
        return Layer(f"lora_unet_{kind}_blocks_{found[2]}_{layer[0]}", modules)

    def tokenized(self, encoders: Any, caption: str) -> str:
        """In the chat template, not thinking, as the pipeline has it."""
        return chat(encoders.tokenizer, caption, enable_thinking=False)

    def size_shift(self, scheduler: Any, latent_shape: tuple[int, int, int]) -> float:
        """As the pipeline computes it for its usual number of steps."""
        from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

        return compute_empirical_mu(self.num_tokens(latent_shape), _DRAWING_STEPS)

    @cached_property
    def _statistics(self) -> dict[str, Tensor]:
        """Running mean and variance of the VAE's batch norm, which are weights of it."""
        from safetensors import safe_open

        found: dict[str, Tensor] = {}
        for path in weight_files(self.folder / "vae"):
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt") as file:
                    names = {"bn.running_mean", "bn.running_var"} & set(file.keys())
                    found |= {name: file.get_tensor(name).float() for name in names}
        if len(found) != len(("mean", "variance")):
            fix = "download the model again, with its VAE as safetensors"
            what = "the VAE has no running mean and variance, by which latents are normalised"
            raise ModelError(what, where=str(self.folder / "vae"), fix=fix)
        return found

    def normalise(self, raw_latent: Tensor) -> Tensor:
        """The latent in patches (B, 4 C, h / 2, w / 2), each of their values by its mean and deviation."""
        patches = self.pipeline_class()._patchify_latents(raw_latent)
        mean, std = self._mean_and_deviation(patches.device)
        return (patches - mean) / std

    def denormalise(self, latent: Tensor) -> Tensor:
        """The raw latent (B, C, h, w), out of patches."""
        mean, std = self._mean_and_deviation(latent.device)
        return self.pipeline_class()._unpatchify_latents(latent * std + mean)

    def _mean_and_deviation(self, device: Any) -> tuple[Tensor, Tensor]:
        """Of each value of a patch, (4 C, 1, 1)."""
        import torch

        variance = self._statistics["bn.running_var"] + float(self.vae_config["batch_norm_eps"])
        both = self._statistics["bn.running_mean"], torch.sqrt(variance)
        mean, std = (each.to(device)[:, None, None] for each in both)
        return mean, std

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        """`Flux2KleinPipeline.encode_prompt`."""
        embedding, _ = encoders.encode_prompt(
            caption, device=encoders.text_encoder.device, max_sequence_length=_TOKENS
        )
        return {"text_embedding": embedding}

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        """The transformer's sample, of tokens that the pipeline's own functions pack, number and unpack."""
        pipeline, text = self.pipeline_class(), conditions["text_embedding"]
        ids = pipeline._prepare_latent_ids(noisy).to(noisy.device)
        tokens = denoiser(
            hidden_states=pipeline._pack_latents(noisy),
            timestep=timesteps / self.num_timesteps,
            guidance=None,
            encoder_hidden_states=text,
            txt_ids=pipeline._prepare_text_ids(text).to(noisy.device),
            img_ids=ids,
            return_dict=False,
        )[0]
        return pipeline._unpack_latents_with_ids(tokens, ids, *noisy.shape[2:])

    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], empty_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Guided away from the empty caption, where the model is not distilled."""
        return {
            "prompt_embeds": text["text_embedding"],
            "negative_prompt_embeds": empty_text["text_embedding"],
        }
