"""Stable Diffusion XL: two CLIP text encoders, a UNet told of sizes and crop, a VAE of 4 channels.

How captions are encoded, noise is added and pictures are drawn is diffusers' own code, called and not
rewritten.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, cast

from pipeline.errors import FamilyError
from pipeline.families.base import (
    Conditions,
    EncodedCaption,
    Family,
    Posterior,
    Prediction,
    Shapes,
    Use,
)
from pipeline.families.files import read_json, tokenizer_files, weight_files
from pipeline.fingerprints import ModelPart
from pipeline.geometry import Size, latent_size

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor, nn

_GUIDANCE_SCALE = 5.0
_BLOCK = re.compile(r"(down|up)_blocks\.(\d+)\.attentions\.(\d+)\.(.+)")
_MID_BLOCK = re.compile(r"mid_block\.attentions\.0\.(.+)")


class StableDiffusionXL(Family):
    """Stable Diffusion XL and its fine-tunes, with epsilon or v-prediction."""

    name: ClassVar[str] = "Stable Diffusion XL"
    pipeline_classes: ClassVar[tuple[str, ...]] = ("StableDiffusionXLPipeline",)
    components: ClassVar[tuple[str, ...]] = (
        "vae",
        "text_encoder",
        "text_encoder_2",
        "tokenizer",
        "tokenizer_2",
        "unet",
        "scheduler",
    )
    latent_method: ClassVar[str] = "autoencoder-kl scaled, 1"
    text_method: ClassVar[str] = "two clips penultimate padded, 1"

    @cached_property
    def _vae_config(self) -> dict[str, Any]:
        return read_json(self.folder / "vae" / "config.json")

    @cached_property
    def _unet_config(self) -> dict[str, Any]:
        return read_json(self.folder / "unet" / "config.json")

    @property
    def _factor(self) -> int:
        """Pixels on the edge of one latent value."""
        return 2 ** (len(self._vae_config["block_out_channels"]) - 1)

    def size_multiple(self) -> int:
        """The VAE's factor: 8. What the UNet cannot halve evenly it interpolates itself on its way up."""
        return self._factor

    def latent_shape(self, target: Size) -> tuple[int, int, int]:
        """(C, h, w), each edge divided by the VAE's factor."""
        edges = latent_size(target, self._factor)
        return int(self._vae_config["latent_channels"]), edges.height, edges.width

    def text_shapes(self) -> Shapes:
        """Both encoders' hidden states side by side, and the second one's projection; padded to T."""
        first, second = (
            read_json(self.folder / role / "config.json") for role in ("text_encoder", "text_encoder_2")
        )
        width = int(first["hidden_size"]) + int(second["hidden_size"])
        return {
            "text_embedding": (self.max_length(), width),
            "pooled_text_embedding": (int(second["projection_dim"]),),
        }

    def max_length(self) -> int:
        """The tokenizer's limit, which is what `encode_prompt` pads to: 77."""
        return int(read_json(self.folder / "tokenizer" / "tokenizer_config.json")["model_max_length"])

    def prediction_type(self) -> Prediction:
        """`prediction_type` of the scheduler's configuration; epsilon where it says nothing.

        Raises:
            FamilyError: It is something else, such as "sample", or the schedule is EDM's.
        """
        path = self.folder / "scheduler" / "scheduler_config.json"
        config = read_json(path)
        if str(config.get("_class_name", "")).startswith("EDM"):
            raise FamilyError(
                f"the noise schedule {config['_class_name']} cannot be trained",
                where=str(path),
                fix="use a base model with the noise schedule of Stable Diffusion XL",
            )
        kind = config.get("prediction_type", "epsilon")
        if kind not in ("epsilon", "v_prediction"):
            raise FamilyError(
                f"prediction_type {kind!r} cannot be trained",
                where=str(path),
                fix="use a base model with prediction_type epsilon or v_prediction",
            )
        return kind

    def parts(self, use: Use) -> tuple[ModelPart, ...]:
        """VAE for latents; tokenizers and text encoders for text; UNet and scheduler for the denoiser."""
        if use == "latents":
            return (self._network("vae"),)
        if use == "text":
            tokenizers = tuple(
                ModelPart(role, *tokenizer_files(self.folder / role)) for role in ("tokenizer", "tokenizer_2")
            )
            return *tokenizers, self._network("text_encoder"), self._network("text_encoder_2")
        scheduler = self.folder / "scheduler" / "scheduler_config.json"
        return self._network("unet"), ModelPart("scheduler", (scheduler,), ())

    def _network(self, role: str) -> ModelPart:
        folder = self.folder / role
        return ModelPart(role, (folder / "config.json",), weight_files(folder))

    def modelspec_architecture(self) -> str:
        """The one name for the base model and all fine-tunes of it."""
        return "stable-diffusion-xl-v1-base"

    def kohya_key(self, module: str) -> str:
        """`lora_unet_` and Stability AI's path with underscores, or else that of diffusers."""
        try:
            original = self.comfyui_key(module).removeprefix("diffusion_model.")
        except FamilyError:
            original = module
        return "lora_unet_" + original.replace(".", "_")

    def comfyui_key(self, module: str) -> str:
        """`diffusion_model.` and the path in Stability AI's UNet, whose blocks are numbered through.

        There, a level of the way down is its residual blocks and one more block that halves; a level of the
        way up has one residual block more than on the way down, and each block's attention is its member 1.
        """
        if found := _MID_BLOCK.fullmatch(module):
            return f"diffusion_model.middle_block.1.{found[1]}"
        if found := _BLOCK.fullmatch(module):
            layers = self._unet_config.get("layers_per_block", 2)
            if isinstance(layers, int):
                index = int(found[2]) * (layers + 1) + int(found[3])
                side = f"input_blocks.{index + 1}" if found[1] == "down" else f"output_blocks.{index}"
                return f"diffusion_model.{side}.1.{found[4]}"
        raise FamilyError(
            f"the module {module} has no name in the layout that ComfyUI reads",
            where=str(self.folder / "unet" / "config.json"),
            fix="adapt attention modules only, on a UNet with one layers_per_block for all levels",
        )

    def lora_targets(self) -> list[str]:
        """Query, key, value and output of each attention, self and cross."""
        return ["to_q", "to_k", "to_v", "to_out.0"]

    # torch side

    def load_vae(self, dtype: str, device: str) -> nn.Module:
        """An `AutoencoderKL`."""
        from diffusers import AutoencoderKL

        return self._load(AutoencoderKL, "vae", dtype, device)

    def posterior(self, vae: nn.Module, pixels: Tensor) -> Posterior:
        """`AutoencoderKL.encode`, with the deviation computed in float32."""
        import torch

        parameter = next(vae.parameters())
        with torch.inference_mode():
            encoded = cast("Any", vae).encode(pixels.to(parameter.device, parameter.dtype)).latent_dist
            return Posterior(encoded.mean.float(), torch.exp(0.5 * encoded.logvar.float()))

    def normalise(self, raw_latent: Tensor) -> Tensor:
        """(raw_latent - shift) * scaling; published VAEs of the family have no shift."""
        shift = float(self._vae_config.get("shift_factor") or 0.0)
        scale = float(self._vae_config.get("scaling_factor", 0.13025))
        return (raw_latent - shift) * scale if shift else raw_latent * scale

    def load_text_encoders(self, dtype: str, device: str) -> Any:
        """A `StableDiffusionXLPipeline` that has only its tokenizers and its text encoders."""
        from diffusers import StableDiffusionXLPipeline
        from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

        tokenizers = [
            CLIPTokenizer.from_pretrained(self.folder / role, local_files_only=True)
            for role in ("tokenizer", "tokenizer_2")
        ]
        return StableDiffusionXLPipeline(
            vae=cast("Any", None),
            text_encoder=cast("Any", self._load(CLIPTextModel, "text_encoder", dtype, device)),
            text_encoder_2=cast(
                "Any", self._load(CLIPTextModelWithProjection, "text_encoder_2", dtype, device)
            ),
            tokenizer=tokenizers[0],
            tokenizer_2=tokenizers[1],
            unet=cast("Any", None),
            scheduler=cast("Any", None),
            add_watermarker=False,
        )

    def encode_caption(self, encoders: Any, caption: str) -> EncodedCaption:
        """`StableDiffusionXLPipeline.encode_prompt`; what it cuts is counted by the first tokenizer."""
        import torch

        whole = encoders.tokenizer(caption, return_offsets_mapping=True, verbose=False)
        num_tokens = len(whole["input_ids"])
        num_cut = max(0, num_tokens - self.max_length())
        cut_from = whole["offset_mapping"][self.max_length() - 1][0] if num_cut else None
        with torch.inference_mode():
            embedding, _, pooled, _ = encoders.encode_prompt(
                caption, device=encoders.device, num_images_per_prompt=1, do_classifier_free_guidance=False
            )
        tensors = {"text_embedding": embedding[0], "pooled_text_embedding": pooled[0]}
        return EncodedCaption(tensors, num_tokens, num_cut, cut_from)

    def load_denoiser(self, dtype: str, device: str) -> nn.Module:
        """A `UNet2DConditionModel`."""
        from diffusers import UNet2DConditionModel

        return self._load(UNet2DConditionModel, "unet", dtype, device)

    def load_noise_scheduler(self) -> Any:
        """A `DDPMScheduler` with the betas and the prediction type of the base model's scheduler."""
        from diffusers import DDPMScheduler

        return DDPMScheduler.from_pretrained(self.folder, subfolder="scheduler", local_files_only=True)

    def draw_timesteps(self, scheduler: Any, uniform: Tensor) -> Tensor:
        """Each of the schedule's timesteps with the same chance, as int64."""
        return (uniform * scheduler.config.num_train_timesteps).long()

    def add_noise(self, scheduler: Any, latent: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """`DDPMScheduler.add_noise`."""
        return scheduler.add_noise(latent, noise, timesteps)

    def target(self, scheduler: Any, latent: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """The noise, or the velocity (https://arxiv.org/abs/2202.00512) for v-prediction."""
        if self.prediction_type() == "epsilon":
            return noise
        return scheduler.get_velocity(latent, noise, timesteps)

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        """The UNet's sample, for both text tensors and the geometry: https://arxiv.org/abs/2307.01952, 2.2.

        The six time ids are original height and width, crop top and left, target height and width.
        """
        import torch

        names = ("original_size_hw", "crop_top_left", "target_size_hw")
        time_ids = torch.cat([conditions[name] for name in names], dim=1)
        pooled = conditions["pooled_text_embedding"]
        return denoiser(
            noisy,
            timesteps,
            encoder_hidden_states=conditions["text_embedding"],
            added_cond_kwargs={"text_embeds": pooled, "time_ids": time_ids.to(pooled.dtype)},
        ).sample

    def load_pipeline(self, *, denoiser: nn.Module | None = None, dtype: str, device: str) -> Any:
        """A `StableDiffusionXLPipeline` with the base model's own scheduler."""
        from diffusers import StableDiffusionXLPipeline

        pipeline = StableDiffusionXLPipeline.from_pretrained(
            self.folder,
            vae=self.load_vae(dtype, device),
            unet=denoiser if denoiser is not None else self.load_denoiser(dtype, device),
            text_encoder=None,
            text_encoder_2=None,
            tokenizer=None,
            tokenizer_2=None,
            feature_extractor=None,
            image_encoder=None,
            add_watermarker=False,
            local_files_only=True,
        )
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def draw(
        self,
        pipeline: Any,
        text: Mapping[str, Tensor],
        empty_text: Mapping[str, Tensor],
        *,
        size: Size,
        steps: int,
        seed: int,
    ) -> Image.Image:
        """A picture with classifier-free guidance of 5, against zeros where the base model asks for them."""
        import torch

        parameter = next(pipeline.unet.parameters())
        embeddings: dict[str, Tensor] = {}
        zeros = bool(pipeline.config.force_zeros_for_empty_prompt)
        for prefix, tensors in (("", text), ("negative_", empty_text)):
            for name, argument in (
                ("text_embedding", "prompt_embeds"),
                ("pooled_text_embedding", "pooled_prompt_embeds"),
            ):
                tensor = tensors[name].unsqueeze(0).to(parameter.device, parameter.dtype)
                embeddings[prefix + argument] = torch.zeros_like(tensor) if prefix and zeros else tensor
        pictures = pipeline(
            **embeddings,
            height=size.height,
            width=size.width,
            num_inference_steps=steps,
            guidance_scale=_GUIDANCE_SCALE,
            generator=torch.Generator("cpu").manual_seed(seed),
        )
        return pictures.images[0]

    def _load(self, network: Any, role: str, dtype: str, device: str) -> nn.Module:
        import torch

        loaded = network.from_pretrained(
            self.folder / role, dtype=getattr(torch, dtype), local_files_only=True
        )
        return loaded.requires_grad_(False).eval().to(device)
