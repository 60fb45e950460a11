"""The torch-free side of reference images: images that the denoiser sees next to the noisy latent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.images.geometry import Size
from pipeline.models.diffusers_folder import ModelFolder


@dataclass(frozen=True)
class ReferenceSpec:
    """How a family sees reference images.

    Attributes:
        max_number: Maximum number of references of one image.
        size: Size that the family's pipeline gives to a reference of the given size before the VAE encodes it.
        crops: Whether the pipeline crops a reference to the aspect ratio of `size`; otherwise it stretches it.
        required: Whether every image must have a reference.
    """

    max_number: int
    size: Callable[[ModelFolder, Size], Size]
    crops: bool = False
    required: bool = False
