"""The expected results of one family, computed with diffusers alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cache.store import EntrySpec
from pipeline.models.worker.text import SeenImage
from pipeline.trained_lora.worker.micro_input import MicroInput


class Case(ABC):
    """The expected results of a family."""

    pipeline_class: ClassVar[Any]
    """Pipeline class of diffusers."""

    targets: ClassVar[list[str] | str]
    """Modules to adapt, in the form that peft accepts."""

    drawing: ClassVar[dict[str, Any]] = {}
    """Arguments of the pipeline, besides the prompt, that drawing a picture requires."""

    previewing: ClassVar[dict[str, Any]] = {}
    """Arguments of the pipeline, besides the guidance scale, that equal those of a preview."""

    seen: Sequence[SeenImage] = ()
    """Reference images of all samples and previews, as the text encoder sees them."""

    @property
    def seen_in_negative(self) -> Sequence[SeenImage]:
        """Those that the text encoder sees with the empty caption and negative prompts."""
        return self.seen

    def sections(self, folder: Path, photos: Path) -> dict[str, Any]:
        """Return sections of the recipe that differ from those of `settings`."""
        return {}

    def text_spec(self, entries: RecipeEntries, caption: str) -> EntrySpec:
        """Return the entry of a caption."""
        return entries.text_spec(caption)

    def guidance_arguments(self, scale: float) -> dict[str, Any]:
        """Return the arguments of the pipeline that set the guidance scale."""
        return {"guidance_scale": scale}

    def negative_prompt(self, pipe: Any, text: str) -> dict[str, Any]:
        """Return the arguments of the pipeline that set the negative prompt."""
        return {"negative_prompt": text}

    @abstractmethod
    def make(self, folder: Path) -> None:
        """Write the tiny model."""

    def pipeline(self, folder: Path, **parts: Any) -> Any:
        """Load the complete pipeline."""
        return self.pipeline_class.from_pretrained(folder, **parts)

    @abstractmethod
    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        """Return the conditions that the pipeline gives its denoiser, named as in the entries."""

    def pixels(self, pipe: Any, image: np.ndarray[Any, Any]) -> torch.Tensor:
        """Return an image (H, W, 3) as the pipeline's VAE takes it."""
        return pipe.image_processor.preprocess(image[None].astype(np.float32) / 255)

    def latent(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Return the latent of pixels (1, 3, H, W) in [-1, 1], as in the image-to-image pipeline."""
        config = pipe.vae.config
        return (pipe.vae.encode(pixels).latent_dist.mean - config.shift_factor) * config.scaling_factor

    def noisy(self, pipe: Any, micro: MicroInput) -> torch.Tensor:
        """Apply the paper's formula."""
        sigma = (micro.timesteps / 1000)[:, None, None, None]
        return sigma * micro.noise + (1 - sigma) * micro.latent

    def target(self, micro: MicroInput) -> torch.Tensor:
        """Apply the paper's formula."""
        return micro.noise - micro.latent

    @abstractmethod
    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        """Call the pipeline's denoiser, packing and unpacking without its own functions."""

    @abstractmethod
    def kohya_keys(self) -> set[str]:
        """Return the keys of kohya's layers, without suffixes."""

    def comfyui_keys(self, modules: set[str]) -> set[str]:
        """Return ComfyUI's keys of the denoiser's modules; by default it translates diffusers' names."""
        return {f"transformer.{module}" for module in modules}
