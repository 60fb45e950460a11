from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from diffusers import Flux2KleinPipeline, Flux2Pipeline, FluxKontextPipeline
from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS
from PIL import Image

from demo.tiny_models import make_tiny_flux2_dev, make_tiny_flux2_klein, make_tiny_flux_kontext
from pipeline.errors import BucketError
from pipeline.images.geometry import Size
from pipeline.models.families import Family, detect
from pipeline.models.families.parts.references import KONTEXT_RESOLUTIONS
from pipeline.models.worker.loading import empty_components

NUM_SIZES = 16

MODELS: dict[str, tuple[Callable[[Path], None], Any, str]] = {
    "FLUX.2 klein": (make_tiny_flux2_klein, Flux2KleinPipeline, "prepare_image_latents"),
    "FLUX.2 dev": (make_tiny_flux2_dev, Flux2Pipeline, "prepare_image_latents"),
    "FLUX.1 Kontext": (make_tiny_flux_kontext, FluxKontextPipeline, "prepare_latents"),
}
"""Function that makes the tiny model, pipeline class, and its method that gets preprocessed references."""


class PreprocessedError(Exception):
    """Ends a pipeline's call after it has preprocessed its references."""


class Preprocessing:
    """The preprocessing of references inside a pipeline's `__call__`."""

    def __init__(self, pipe: Any, method: str) -> None:
        self.pipe = pipe
        self.pixels = []
        setattr(pipe, method, self.receive)

    def receive(self, image: Any = None, *args: Any, images: Any = None, **kwargs: Any) -> None:
        self.pixels: list[torch.Tensor] = [image] if images is None else images
        raise PreprocessedError

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """Return what the VAE would encode, (1, 3, H, W) in [-1, 1].

        Raises:
            ValueError: The pipeline refuses the image.
        """
        text = {"prompt_embeds": torch.zeros(1, 4, 8)}
        if isinstance(self.pipe, FluxKontextPipeline):
            text["pooled_prompt_embeds"] = torch.zeros(1, 8)
        with pytest.raises(PreprocessedError):
            self.pipe(image=image, height=64, width=64, guidance_scale=1.0, **text)
        (pixels,) = self.pixels
        return pixels


@pytest.fixture(scope="module", params=MODELS)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Family, Preprocessing]:
    make, pipeline_class, method = MODELS[request.param]
    folder = tmp_path_factory.mktemp("base")
    make(folder)
    pipe = pipeline_class.from_pretrained(folder, **_without_text(pipeline_class))
    return detect(folder), Preprocessing(pipe, method)


def _without_text(pipeline_class: Any) -> dict[str, None]:
    """Return the arguments of `from_pretrained` that leave out tokenizers and text encoders."""
    return {
        name: None for name in empty_components(pipeline_class) if name.startswith(("tokenizer", "text_"))
    }


def random_sizes() -> list[Size]:
    """Return sizes of up to 3 megapixels, spread evenly on a logarithmic scale, and a few exact limits."""
    draw = random.Random(1)
    sizes = [Size(*(round(2 ** draw.uniform(6, 11)) for _ in "hw")) for _ in range(NUM_SIZES)]
    sizes += [Size(1024, 1024), Size(1024, 1025), Size(64, 512)]
    return [*sizes, Size(64, 513), Size(513, 64), Size(63, 64), Size(15, 64), Size(16, 16)]


def gradient(size: Size) -> Image.Image:
    """Return an image with values that state their own position."""
    rows = np.linspace(0, 255, size.height)[:, None].repeat(size.width, axis=1)
    columns = np.linspace(0, 255, size.width)[None].repeat(size.height, axis=0)
    return Image.fromarray(np.stack([rows, columns, 255 - rows], axis=2).round().astype(np.uint8))


def values(pixels: torch.Tensor) -> npt.NDArray[np.float64]:
    """Return pixels (1, 3, H, W) in [-1, 1] as (H, W, 3) from 0 to 255."""
    return (pixels[0].permute(1, 2, 0).double().numpy() + 1) * 127.5


def accepted_by(family: Family, original: Size) -> bool:
    """Return whether the declaration accepts a reference of this size."""
    assert family.spec.references is not None
    try:
        family.spec.references.geometry(family.model, original)
    except BucketError:
        return False
    return True


def test_size_and_crop_of_a_reference_are_those_of_the_pipeline(
    model: tuple[Family, Preprocessing],
) -> None:
    family, preprocessing = model
    references = family.spec.references
    assert references is not None
    for original in (size for size in random_sizes() if accepted_by(family, size)):
        image = gradient(original)
        expected = preprocessing(image)
        geometry = references.geometry(family.model, original)
        target = geometry.target_size
        assert target == references.size(family.model, original) == tuple(expected.shape[2:]), original
        resized = image.resize(
            (target.width, target.height), Image.Resampling.BICUBIC, box=geometry.source_box
        )
        # The pipelines shrink with another filter, which rounds a gradient differently.
        np.testing.assert_allclose(np.asarray(resized), values(expected), atol=1.5)


def test_the_sizes_that_are_refused_are_those_that_the_pipeline_refuses(
    model: tuple[Family, Preprocessing],
) -> None:
    family, preprocessing = model
    assert family.spec.references is not None
    for original in (size for size in random_sizes() if not accepted_by(family, size)):
        with pytest.raises(BucketError) as caught:
            family.spec.references.geometry(family.model, original)
        assert f", got {original} (height x width)" in caught.value.what
        # Kontext's pipeline rounds the edges to zero.
        with pytest.raises((ValueError, ZeroDivisionError), match=r"too small|too extreme|by zero"):
            preprocessing(gradient(original))


def test_the_resolutions_of_kontext_are_those_of_diffusers() -> None:
    assert list(KONTEXT_RESOLUTIONS) == PREFERRED_KONTEXT_RESOLUTIONS


@pytest.mark.parametrize("model", ["FLUX.2 klein", "FLUX.2 dev"], indirect=True)
def test_a_reference_that_is_not_scaled_keeps_its_pixels(model: tuple[Family, Preprocessing]) -> None:
    family, preprocessing = model
    references = family.spec.references
    assert references is not None
    noise = np.random.default_rng(1).integers(0, 256, (203, 310, 3), dtype=np.uint8)
    geometry = references.geometry(family.model, Size(203, 310))
    crop = geometry.crop
    expected = noise[crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
    np.testing.assert_allclose(values(preprocessing(Image.fromarray(noise))), expected, atol=1e-4)
