"""Draw previews with the family's diffusers pipeline, from stored text embeddings."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from pipeline.images.geometry import Size
from pipeline.models.families import Family
from pipeline.models.worker.denoiser import DenoiserCall
from pipeline.models.worker.loading import empty_components, pipeline_class, unpacked_weight
from pipeline.models.worker.text import TextConditioner
from pipeline.models.worker.vae import VaeCodec

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class PictureSettings:
    """How one picture is drawn.

    Attributes:
        size: Size in pixels, multiples of the family's size multiple.
        steps: Number of denoising steps, at least 1.
        seed: Seed of the first noise, which is drawn on the CPU.
        guidance_scale: Guidance scale; None for the family's.
    """

    size: Size
    steps: int
    seed: int
    guidance_scale: float | None = None


class PipelineDrawing:
    """The diffusers pipeline of a base model, without text encoders."""

    def __init__(self, family: Family, vae: VaeCodec, text: TextConditioner, denoiser: DenoiserCall) -> None:
        self.family = family
        self.vae = vae
        self.text = text
        self.denoiser = denoiser

    def load_pipeline(self, *, denoiser: nn.Module | None = None, dtype: str, device: str) -> Any:
        """Return the pipeline for `draw`, silent and without a safety checker.

        `denoiser` may include an adapter; None loads the base model's own. `dtype` is for loaded networks.
        """
        components: dict[str, Any] = {
            "vae": self.vae.load(dtype, device),
            self.family.spec.denoiser_name: (
                denoiser if denoiser is not None else self.denoiser.load(dtype, device)
            ),
        }
        pipeline = self.assemble(components)
        pipeline.set_progress_bar_config(disable=True)

        # Under autocast, SDXL's VAE would overflow and decode to black.
        for method in ("encode", "decode"):
            _call_without_autocast(components["vae"], method)
        return pipeline

    def assemble(self, components: Mapping[str, Any]) -> Any:
        """Return the pipeline with these components and the base model's scheduler."""
        kind = pipeline_class(self.family)
        empty = empty_components(kind)
        del empty["scheduler"]  # from_pretrained loads the base model's own
        options = self.family.spec.pipeline_options(self.family.model)
        return kind.from_pretrained(
            self.family.model.path,
            **{**empty, **components, **self.further_components(), **options},
            local_files_only=True,
        )

    def further_components(self) -> dict[str, Any]:
        """Return components that the pipeline's constructor requires; most pipelines require no others."""
        return {}

    def allow_size(self, pipeline: Any, size: Size) -> None:
        """Make the pipeline accept exactly this size; most pipelines do anyway."""

    def size_arguments(self, size: Size) -> dict[str, Any]:
        """Return the pipeline's arguments that set the size of the picture."""
        return {"height": size.height, "width": size.width}

    def draw(
        self,
        pipeline: Any,
        text: Mapping[str, Tensor],
        empty_text: Mapping[str, Tensor],
        settings: PictureSettings,
        *,
        negative_text: Mapping[str, Tensor] | None = None,
        references: Sequence[Image.Image] = (),
    ) -> Image.Image:
        """Return one picture, which is the same for the same seed on the same device.

        Texts are the tensors of entries: of the caption, of the empty caption, which guidance uses, and of a
        negative prompt that replaces the empty caption. References are upright and RGB, of any size.
        """
        weight = unpacked_weight(getattr(pipeline, self.family.spec.denoiser_name))

        # For every base model, the empty prompt is the embedding of an empty caption, as in training with
        # caption dropout and in other programs. diffusers' pipeline would use zeros for a model with
        # `force_zeros_for_empty_prompt`, such as SDXL's, if it were called without a negative prompt.
        stacked = self.text.stack([text, empty_text if negative_text is None else negative_text])
        prompt, negative = (
            {name: _on_device(rows[index : index + 1], weight) for name, rows in stacked.items()}
            for index in (0, 1)
        )

        guidance_scale = settings.guidance_scale
        if guidance_scale is None:
            guidance_scale = self.family.spec.guidance_scale
        self.allow_size(pipeline, settings.size)
        arguments = {
            **self.text.prompt_arguments(pipeline, prompt, negative),
            **self.text.guidance_arguments(guidance_scale),
            **self.size_arguments(settings.size),
            **({"image": list(references)} if references else {}),
            "num_inference_steps": settings.steps,
            "generator": torch.Generator("cpu").manual_seed(settings.seed),
        }
        return self.call(pipeline, arguments)[0]

    def call(self, pipeline: Any, arguments: Mapping[str, Any]) -> Sequence[Image.Image]:
        """Return the pictures that the pipeline draws with these arguments."""
        pictures, *_ = pipeline(**arguments, return_dict=False)
        return pictures


def _on_device(value: Any, weight: Tensor) -> Any:
    # Numbers of tokens are Python integers.
    return value.to(weight.device, weight.dtype) if isinstance(value, Tensor) else value


def _call_without_autocast(vae: nn.Module, method: str) -> None:
    # A strong reference would be a cycle, and keep the VAE in memory after its last use.
    call, vae_reference = getattr(type(vae), method), weakref.ref(vae)

    def call_in_own_dtype(values: Tensor, *arguments: Any, **options: Any) -> Any:
        network = cast("nn.Module", vae_reference())
        weight = unpacked_weight(network)
        with torch.autocast(weight.device.type, enabled=False):
            return call(network, values.to(weight.dtype), *arguments, **options)

    setattr(vae, method, call_in_own_dtype)
