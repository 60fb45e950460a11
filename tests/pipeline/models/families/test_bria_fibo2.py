from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import BriaFibo2Pipeline
from diffusers.pipelines.bria_fibo2.image_processor import BriaFibo2ImageProcessor
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from demo.tiny_models import make_tiny_bria_fibo2
from pipeline.errors import BucketError, ModelError
from pipeline.images.geometry import Size
from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families.parts.references import FIBO2_REFERENCES
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.models.worker.inference import PictureSettings
from pipeline.models.worker.vae import channels_last
from tests.pipeline.models.families.bria_fibo2_case import (
    Fibo2Case,
    Fibo2EditCase,
    calls_of,
    check_calls,
    conditions,
    seen,
    small_references,
)
from tests.pipeline.models.families.case import Case
from tests.pipeline.models.families.complete_job import TOLERANCE
from tests.pipeline.models.families.references_case import pictures, random_latents

JSON_CAPTION = """{
    "short_description": "a red cat",
    "objects": [{"description": "a cat", "location": ""}, {}],
    "lighting": {"conditions": "sun", "direction": null},
    "aesthetics": {"aesthetic_score": "high"},
    "preference_score": "low"
}"""
CLEANED = (
    '{"short_description":"a red cat","objects":[{"description":"a cat"}],"lighting":{"conditions":"sun"}}'
)


def test_the_complete_job_with_references_equals_diffusers(check_family: Callable[[Case], None]) -> None:
    with small_references():
        check_family(Fibo2EditCase())


def test_the_complete_job_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    check_family(Fibo2Case())


@pytest.fixture
def small() -> Iterator[None]:
    with small_references():
        yield


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[WorkerFamily, Any]:
    """Return the tiny model and its complete pipeline."""
    folder = tmp_path_factory.mktemp("base")
    make_tiny_bria_fibo2(folder)
    pipe = Fibo2Case().pipeline(folder)
    assert isinstance(pipe, BriaFibo2Pipeline)
    pipe.set_progress_bar_config(disable=True)
    channels_last(pipe.vae)  # `test_vae.py` compares with the usual order
    return load_family(folder), pipe


@pytest.mark.parametrize("caption", ["a cat", JSON_CAPTION, "a <|image_pad|> cat", '["a list"]'])
def test_training_calls_the_transformer_as_each_step_of_the_pipeline_does(
    loaded: tuple[WorkerFamily, Any], caption: str
) -> None:
    family, pipe = loaded
    drawn = calls_of(pipe, caption, guidance_scale=1.0)
    assert len(drawn) == 3
    check_calls(family, pipe, drawn, conditions(family, caption))

    levels = torch.linspace(1, 1 / 3, 3, dtype=torch.float64)
    timesteps = family.noise.timesteps(family.noise.load_scheduler(), levels, (32, 4, 6))
    torch.testing.assert_close(timesteps, pipe.scheduler.timesteps)


def test_the_empty_caption_is_the_negative_prompt_of_the_pipeline(loaded: tuple[WorkerFamily, Any]) -> None:
    family, pipe = loaded
    _, (guiding, _), *_ = calls_of(pipe, "a cat", guidance_scale=5.0)
    given = family.text.prompt_tensors(conditions(family, ""))
    torch.testing.assert_close(given["prompt_embeds"], guiding["encoder_hidden_states"], **TOLERANCE)


def test_a_json_caption_is_cleaned_as_in_the_pipeline(loaded: tuple[WorkerFamily, Any]) -> None:
    family, _ = loaded
    embeddings = [conditions(family, each)["text_embedding"] for each in (JSON_CAPTION, CLEANED)]
    assert torch.equal(*embeddings)
    assert json.loads(JSON_CAPTION) != json.loads(CLEANED)


def test_texts_in_a_json_caption_are_encoded_as_words_only(loaded: tuple[WorkerFamily, Any]) -> None:
    """The pipeline by default also shows the language model a picture of each text."""
    family, pipe = loaded
    caption = '{"short_description":"a page","text_render":[{"text":"cat"}]}'
    ((given, _), *_) = calls_of(pipe, caption, guidance_scale=1.0, render_text_images=False)
    ours = family.text.prompt_tensors(conditions(family, caption))["prompt_embeds"]
    torch.testing.assert_close(ours, given["encoder_hidden_states"], **TOLERANCE)


def test_sizes_are_limited_by_the_positions_of_the_transformer(loaded: tuple[WorkerFamily, Any]) -> None:
    family, _ = loaded
    assert family.size_multiple() == 16
    assert family.latent_shape(Size(64, 96)) == (32, 4, 6)
    assert family.latent_shape(Size(16, 2048)) == (32, 1, 128)
    with pytest.raises(BucketError, match="no edge may be longer than 2048 px"):
        family.latent_shape(Size(16, 2064))


@given(height=st.integers(16, 6000), width=st.integers(16, 6000))
@example(height=1000, width=1000)
def test_references_have_the_sizes_of_the_pipeline(height: int, width: int) -> None:
    original, model = Size(height, width), ModelFolder(Path())
    processor = BriaFibo2ImageProcessor(vae_scale_factor=16)
    size = FIBO2_REFERENCES.size(model, original)
    assert (size.width, size.height) == processor.get_image_size(width / height)

    geometry = FIBO2_REFERENCES.geometry(model, original)
    crops: list[Any] = []
    picture = FakePicture(width, height, crops)
    processor._resize_and_crop(picture, size.width, size.height)  # pyright: ignore[reportArgumentType]
    top, left = geometry.crop.top, geometry.crop.left
    resized = (geometry.resized_size.width, geometry.resized_size.height)
    assert crops == [resized, (left, top, left + size.width, top + size.height)]


class FakePicture:
    """A picture that records how it is resized and cropped, and has no pixels."""

    def __init__(self, width: int, height: int, record: list[Any]) -> None:
        self.width, self.height, self.record = width, height, record

    def convert(self, mode: str) -> FakePicture:
        return self

    def resize(self, size: tuple[int, int], resample: Any) -> FakePicture:
        self.record.append(size)
        return self

    def crop(self, box: tuple[int, ...]) -> None:
        self.record.append(box)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("number", [1, 2, 3])
def test_training_with_references_calls_the_transformer_as_each_step_of_the_pipeline_does(
    loaded: tuple[WorkerFamily, Any], number: int
) -> None:
    """The pipeline encodes the references; their latents and the caption that sees them are compared too."""
    family, pipe = loaded
    images = pictures(number)
    size = {"height": None, "width": None} if number == 1 else {}
    drawn = calls_of(pipe, "make it a cat", image=images, guidance_scale=1.0, num_inference_steps=2, **size)
    vae = family.vae.load("float32", "cpu")
    latents: list[torch.Tensor] = []
    for image in images:
        ((pixels,), _) = pipe.image_processor.preprocess(image)
        latents.append(family.vae.normalise(family.vae.posterior(vae, pixels).mean))
        assert latents[-1].std() > 0.1
    its = {**conditions(family, "make it a cat", images), "references": tuple(latents)}

    assert {len(arguments["context_latents"]) for arguments, _ in drawn} == {number}
    check_calls(family, pipe, drawn, its)


@pytest.mark.usefixtures("small")
def test_the_transformer_predicts_nothing_for_references(loaded: tuple[WorkerFamily, Any]) -> None:
    """The last layer sees only the tokens of the target, so the gradient of the others there is zero."""
    family, pipe = loaded
    noisy, target, *latents = random_latents(family, [Size(64, 96), Size(64, 96), Size(64, 64)])
    its = {**conditions(family, "a cat"), "references": tuple(latents)}
    answers: list[torch.Tensor] = []

    def record(_: Any, __: Any, result: torch.Tensor) -> torch.Tensor:
        answers.append(result.detach().requires_grad_())
        return answers[-1]

    hooks = [each.register_forward_hook(record) for each in (pipe.transformer.layers[-1],)]
    prediction = family.denoiser.predict(pipe.transformer, noisy, torch.tensor([500.0]), its)
    (prediction - target).square().mean().backward()
    for hook in hooks:
        hook.remove()
    (states,) = answers
    assert states.grad is not None
    num_target, num_references = 4 * 6, 4 * 4
    num_gist = states.shape[1] - num_target - num_references
    assert num_gist > 0
    gradient = states.grad.split([num_gist, num_target, num_references], dim=1)
    assert not bool(gradient[0].any())
    assert bool(gradient[1].any(dim=2).all())
    assert not bool(gradient[2].any())
    assert prediction.shape == target.shape


@pytest.mark.usefixtures("small")
def test_order_height_and_width_of_references_change_prediction_and_embedding(
    loaded: tuple[WorkerFamily, Any],
) -> None:
    family, pipe = loaded
    noisy, *latents = random_latents(family, [Size(64, 96), Size(64, 128), Size(64, 128)], batch=2)
    text = conditions(family, "a cat")
    texts = family.text.stack([{"text_embedding": text["text_embedding"][0]}] * 2)

    def predict(latents: list[torch.Tensor], sample: slice = slice(None)) -> torch.Tensor:
        its = {name: value[sample] for name, value in texts.items()}
        its["references"] = tuple(each[sample] for each in latents)
        with torch.no_grad():
            times = torch.tensor([300.0, 700.0])[sample]
            return family.denoiser.predict(pipe.transformer, noisy[sample], times, its)

    base = predict(latents)
    changed = (
        latents[::-1],
        [latents[0].mT, latents[1]],
        latents[:1],
        [],
        [latents[0].flip(0), latents[1]],
    )
    for other in changed:
        assert (predict(other) - base).abs().max() > 1e-4
    alone = torch.cat([predict(latents, slice(each, each + 1)) for each in range(2)])
    torch.testing.assert_close(alone, base, **TOLERANCE)

    one, two = pictures(2)
    embedding = conditions(family, "a cat", [one, two])["text_embedding"]
    turned = one.transpose(Image.Transpose.TRANSPOSE)
    for images in ([two, one], [turned, two], [one]):
        other = conditions(family, "a cat", images)["text_embedding"]
        assert other.shape != embedding.shape or (other - embedding).abs().max() > 1e-3


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("number", [1, 3])
def test_a_preview_with_references_equals_the_picture_of_the_pipeline(
    loaded: tuple[WorkerFamily, Any], number: int
) -> None:
    """The size of the picture is the pipeline's default, to which it crops a single reference."""
    family, pipe = loaded
    images = pictures(number)
    encoders = family.text.load("float32", "cpu")
    text = family.text.encode_caption(encoders, "a cat", seen(images)).tensors
    empty = family.text.encode_caption(encoders, "").tensors
    pipeline = family.drawing.load_pipeline(dtype="float32", device="cpu")
    settings = PictureSettings(seen(images)[0].size, steps=2, seed=1)
    preview = family.drawing.draw(pipeline, text, empty, settings, references=images)
    generator = torch.Generator().manual_seed(1)
    options: dict[str, Any] = {"num_inference_steps": 2, "output_type": "np", "return_dict": False}
    (expected,), *_ = pipe("a cat", images, generator=generator, **options)
    np.testing.assert_allclose(np.asarray(preview) / 255, expected, atol=0.6 / 255)
    plain = family.drawing.draw(pipeline, text, empty, settings)
    assert not np.array_equal(np.asarray(preview), np.asarray(plain))


@pytest.mark.usefixtures("small")
def test_a_single_reference_is_seen_as_in_training_whatever_the_size_of_the_preview(
    loaded: tuple[WorkerFamily, Any],
) -> None:
    family, _ = loaded
    pipeline = family.drawing.load_pipeline(dtype="float32", device="cpu")
    text = conditions(family, "a cat", pictures(1))
    tensors = {"text_embedding": text["text_embedding"][0]}
    calls: list[Any] = []
    hook = pipeline.transformer.register_forward_pre_hook(
        lambda _, __, own: calls.append(own["context_latents"]), with_kwargs=True
    )
    size = PictureSettings(Size(64, 64), steps=1, seed=1)
    family.drawing.draw(pipeline, tensors, tensors, size, references=pictures(1))
    hook.remove()
    edges = FIBO2_REFERENCES.size(family.model, Size(64, 160))
    shapes = [tuple(each.shape[2:]) for (each,) in calls]
    assert shapes == [(edges.height // 8, edges.width // 8)] * 2


def test_an_edit_caption_in_json_needs_an_instruction(loaded: tuple[WorkerFamily, Any]) -> None:
    family, _ = loaded
    with pytest.raises(ModelError, match="edit_instruction") as raised:
        conditions(family, '{"short_description":"a cat"}', pictures(1))
    assert raised.value.where == '{"short_description":"a cat"}'


@pytest.mark.usefixtures("small")
def test_a_caption_with_references_is_never_cut(loaded: tuple[WorkerFamily, Any]) -> None:
    family, _ = loaded
    with pytest.raises(ModelError, match="at most 4096 tokens, got 4"):
        conditions(family, "cat " * 4090, pictures(1))
