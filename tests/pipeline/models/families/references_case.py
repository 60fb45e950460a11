"""Reference images of one family, compared with the calls that diffusers' pipeline makes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import fold

from pipeline.images.geometry import Size
from pipeline.models.worker.family import WorkerFamily
from pipeline.models.worker.inference import PictureSettings
from tests.pipeline.models.families.case import Case
from tests.pipeline.models.families.complete_job import TOLERANCE, draw_picture

TARGET = Size(64, 96)
SIZES = (Size(64, 160), Size(99, 75), Size(64, 80))
"""Sizes of references in pixels; the second is cropped by pipelines that crop."""

CALL_TOLERANCE = {"rtol": 0.0, "atol": 1e-6}


class Recording(nn.Module):
    """A denoiser that records the arguments and results of its calls, and detaches the results."""

    def __init__(self, denoiser: Any) -> None:
        super().__init__()
        self.denoiser = denoiser
        self.calls: list[tuple[dict[str, Any], torch.Tensor]] = []

    def forward(self, **arguments: Any) -> tuple[torch.Tensor]:
        with torch.no_grad():
            result = self.denoiser(**arguments)[0]
        result.requires_grad_()
        self.calls.append((arguments, result))
        return (result,)


def picture(size: Size, *, seed: int) -> Image.Image:
    """Return an image of noise."""
    draw = np.random.default_rng(seed)
    return Image.fromarray(draw.integers(0, 256, (*size, 3), dtype=np.uint8))


def pictures(number: int) -> list[Image.Image]:
    return [picture(size, seed=seed) for seed, size in enumerate(SIZES[:number])]


@contextmanager
def encoded_references(pipe: Any) -> Iterator[list[torch.Tensor]]:
    """Collect the latents of references that the pipeline encodes in this context."""
    latents: list[torch.Tensor] = []
    encode = pipe._encode_vae_image
    pipe._encode_vae_image = lambda *args, **kwargs: latents.append(encode(*args, **kwargs)) or latents[-1]
    yield latents
    del pipe._encode_vae_image


def caption_conditions(family: WorkerFamily, number: int = 1) -> dict[str, Any]:
    encoders = family.text.load("float32", "cpu")
    return {**family.text.stack([family.text.encode_caption(encoders, "a cat").tensors] * number)}


def check_encoding(family: WorkerFamily, pipe: Any, **options: Any) -> None:
    """The latent of the reference's pixels, cropped by the declared geometry, is the pipeline's own."""
    references = family.spec.references
    assert references is not None
    images = pictures(min(references.max_number, 3))
    arguments = {"height": 64, "width": 64, "num_inference_steps": 1, "guidance_scale": 1.0, **options}
    with encoded_references(pipe) as encoded:
        pipe(prompt="a cat", image=images, **arguments)
    assert len(encoded) == len(images)

    vae = family.vae.load("float32", "cpu")
    for image, expected in zip(images, encoded, strict=True):
        size = Size(image.height, image.width)
        box = None
        if references.crops:
            geometry = references.geometry(family.model, size)
            assert geometry.resized_size == size  # so that both encode the same pixels
            left, top, right, bottom = geometry.source_box
            box = (int(left), int(top), int(right), int(bottom))
        pixels = torch.from_numpy(np.array(image.crop(box))).permute(2, 0, 1)[None].float() / 127.5 - 1
        actual = family.vae.normalise(family.vae.posterior(vae, pixels).mean)
        assert actual.std() > 0.1
        torch.testing.assert_close(actual, expected, **TOLERANCE)


def check_calls(
    family: WorkerFamily,
    pipe: Any,
    *,
    number: int,
    caption: dict[str, Any] | None = None,
    unused: Iterable[str] = ("joint_attention_kwargs",),
    **options: Any,
) -> None:
    """Training calls the denoiser as each step of the pipeline does, with the same references.

    `caption` holds the conditions of "a cat" if its embeddings depend on the references.
    """
    drawn = Recording(pipe.transformer)
    hook = pipe.transformer.register_forward_hook(
        lambda _, __, given, result: drawn.calls.append((given, result[0])), with_kwargs=True
    )
    arguments = {"height": TARGET.height, "width": TARGET.width, "num_inference_steps": 2, **options}
    with encoded_references(pipe) as references:
        pipe(prompt="a cat", image=pictures(number) or None, guidance_scale=1.0, **arguments)
    hook.remove()
    assert len(references) == number
    assert len(drawn.calls) == 2

    references = [each.squeeze(2) if each.ndim == 5 else each for each in references]
    conditions = {**(caption or caption_conditions(family)), "references": tuple(references)}
    shape = family.latent_shape(TARGET)
    for given, result in drawn.calls:
        ours = Recording(pipe.transformer)
        noisy = latent(given["hidden_states"], shape)
        prediction = family.denoiser.predict(ours, noisy, 1000 * given["timestep"], conditions)
        ((own, _),) = ours.calls
        assert given.keys() - own.keys() == set(unused)
        for name, value in own.items():
            torch.testing.assert_close(value, given[name], **CALL_TOLERANCE)
        torch.testing.assert_close(prediction.detach(), latent(result, shape), **TOLERANCE)


def latent(tokens: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
    """Return the latent of the first of the tokens."""
    channels, height, width = shape
    edge = round((tokens.shape[2] / channels) ** 0.5)
    tokens = tokens[:, : (height // edge) * (width // edge)]
    return fold(tokens.mT, (height, width), edge, stride=edge)


def random_latents(family: WorkerFamily, sizes: Iterable[Size], *, batch: int = 1) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(batch, *family.latent_shape(size), generator=draw) for size in sizes]


def check_loss(
    family: WorkerFamily, pipe: Any, *, caption: dict[str, Any] | None = None, target_last: bool = False
) -> None:
    """The loss depends on each value predicted for the target, and on none predicted for a reference.

    `caption` is as for `check_calls`. With `target_last`, the denoiser's last tokens are those of the target.
    """
    noisy, target, *references = random_latents(family, [TARGET, TARGET, Size(64, 64)])
    denoiser = Recording(pipe.transformer)
    conditions = {**(caption or caption_conditions(family)), "references": tuple(references)}
    prediction = family.denoiser.predict(denoiser, noisy, torch.tensor([500.0]), conditions)
    (prediction - target).square().mean().backward()
    ((_, tokens),) = denoiser.calls
    assert tokens.grad is not None
    num_target = noisy.numel() // tokens.shape[2]
    assert tokens.shape[1] > num_target
    gradient = tokens.grad.flip(1) if target_last else tokens.grad
    assert bool(gradient[:, :num_target].all())
    assert not bool(gradient[:, num_target:].any())


def check_order(
    family: WorkerFamily, pipe: Any, *, number: int, captions: dict[str, Any] | None = None
) -> None:
    """Order, height and width of references change the prediction; a batch changes nothing.

    `captions` holds the conditions of two captions if their embeddings depend on the references.
    """
    noisy, *references = random_latents(family, [TARGET, *(Size(64, 128),) * number], batch=2)
    conditions = captions or caption_conditions(family, 2)

    def predict(references: Iterable[torch.Tensor] | None, sample: slice = slice(None)) -> torch.Tensor:
        its = {name: value[sample] for name, value in conditions.items()}
        if references is not None:
            its["references"] = tuple(reference[sample] for reference in references)
        timesteps = torch.tensor([300.0, 700.0])[sample]
        with torch.no_grad():
            return family.denoiser.predict(pipe.transformer, noisy[sample], timesteps, its)

    base = predict(references)
    changed = [
        predict([references[0].mT, *references[1:]]),
        predict([references[0].flip(0), *references[1:]]),
    ]
    changed.append(predict(None))
    if number > 1:
        changed.append(predict(references[::-1]))
    for other in changed:
        assert (other - base).abs().max() > 1e-4
    assert torch.equal(predict(()), predict(None))
    alone = torch.cat([predict(references, slice(each, each + 1)) for each in range(2)])
    torch.testing.assert_close(alone, base, **TOLERANCE)


def check_preview(case: Case, family: WorkerFamily, pipe: Any, *, number: int) -> None:
    """A preview with references equals the picture of the complete pipeline with the same images."""
    encoders = family.text.load("float32", "cpu")
    text, empty = (family.text.encode_caption(encoders, caption).tensors for caption in ("a cat", ""))
    pipeline = family.drawing.load_pipeline(dtype="float32", device="cpu")
    settings = PictureSettings(Size(64, 64), steps=2, seed=1)
    images = pictures(number)
    preview = family.drawing.draw(pipeline, text, empty, settings, references=images)
    guidance = case.guidance_arguments(family.spec.guidance_scale)
    expected = draw_picture(case, pipe, image=images, **guidance, **case.previewing)
    np.testing.assert_allclose(np.asarray(preview) / 255, expected, atol=0.6 / 255)
    plain = family.drawing.draw(pipeline, text, empty, settings)
    assert not np.array_equal(np.asarray(preview), np.asarray(plain))
