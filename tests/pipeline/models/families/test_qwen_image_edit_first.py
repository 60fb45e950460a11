from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from diffusers import QwenImageEditPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as first_edit
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

from demo.tiny_models import make_tiny_qwen_image_edit
from pipeline.images.geometry import Size
from pipeline.models.families.parts import references as declared
from pipeline.models.families.parts.references import QWEN_FIRST_EDIT_REFERENCES
from pipeline.models.families.qwen_image_edit_first import QWEN_IMAGE_EDIT_FIRST
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.models.worker.inference import PictureSettings
from pipeline.models.worker.text import SeenImage
from tests.pipeline.models.families.case import Case
from tests.pipeline.models.families.complete_job import TOLERANCE
from tests.pipeline.models.families.references_case import (
    TARGET,
    Recording,
    check_loss,
    check_order,
    encoded_references,
    latent,
    pictures,
)
from tests.pipeline.models.families.test_qwen_image_edit import QwenImageEditCase

REFERENCE_PX = 96 * 96
"""Area of references in this file, in place of a megapixel."""

TEXT_IMAGES = QWEN_FIRST_EDIT_REFERENCES.in_text
assert TEXT_IMAGES is not None


@contextmanager
def small_references() -> Iterator[None]:
    of_area = first_edit.calculate_dimensions
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(declared, "QWEN_PX", REFERENCE_PX)
        patch.setattr(first_edit, "calculate_dimensions", lambda area, ratio: of_area(REFERENCE_PX, ratio))
        yield


def seen(image: Image.Image) -> list[SeenImage]:
    assert TEXT_IMAGES is not None
    return [SeenImage(image, TEXT_IMAGES.size(Size(image.height, image.width)))]


class FirstEditCase(QwenImageEditCase):
    pipeline_class = QwenImageEditPipeline
    # One image, because the pipeline shows images of a list to its text encoder without resizing them.
    drawing: ClassVar[dict[str, Any]] = {"image": pictures(1)[0]}

    def __init__(self) -> None:
        self.seen = seen(pictures(1)[0])

    def make(self, folder: Path) -> None:
        make_tiny_qwen_image_edit(folder, first=True)


def test_the_complete_job_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    with small_references():
        check_family(FirstEditCase())


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WorkerFamily, Any]]:
    """Yield the tiny model and its complete pipeline, with small references."""
    folder = tmp_path_factory.mktemp("base")
    make_tiny_qwen_image_edit(folder, first=True)
    pipe = FirstEditCase().pipeline(folder)
    pipe.set_progress_bar_config(disable=True)
    with small_references():
        yield load_family(folder), pipe


def conditions(family: WorkerFamily, caption: str = "a cat") -> dict[str, Any]:
    encoders = family.text.load("float32", "cpu")
    (image,) = pictures(1)
    return family.text.stack([family.text.encode_caption(encoders, caption, seen(image)).tensors])


@given(height=st.integers(16, 6000), width=st.integers(16, 6000))
def test_a_reference_has_the_size_of_the_pipeline_and_fits_an_embedding(height: int, width: int) -> None:
    assert TEXT_IMAGES is not None
    original = Size(height, width)
    if max(original) > 200 * min(original):
        return
    size = TEXT_IMAGES.size(original)
    assert (size.width, size.height) == first_edit.calculate_dimensions(1024 * 1024, width / height)[:2]
    assert size == QWEN_FIRST_EDIT_REFERENCES.size(None, original)  # pyright: ignore[reportArgumentType] - unused
    num_tokens = Qwen2VLImageProcessorPil().get_number_of_image_patches(*size) // 4
    assert 1024 + num_tokens <= QWEN_IMAGE_EDIT_FIRST.text.tokens


@pytest.mark.parametrize("caption", ["a cat", ""])
def test_embeddings_are_the_ones_that_the_pipeline_makes_of_caption_and_reference(
    loaded: tuple[WorkerFamily, Any], caption: str
) -> None:
    family, pipe = loaded
    (image,) = pictures(1)
    width, height, _ = first_edit.calculate_dimensions(1024 * 1024, image.width / image.height)
    with torch.no_grad():
        expected, mask = pipe.encode_prompt(caption, image=pipe.image_processor.resize(image, height, width))
    assert mask is None
    torch.testing.assert_close(conditions(family, caption)["text_embedding"], expected, **TOLERANCE)


def test_training_calls_the_transformer_as_each_step_of_the_pipeline_does(
    loaded: tuple[WorkerFamily, Any],
) -> None:
    family, pipe = loaded
    calls: list[tuple[dict[str, Any], torch.Tensor]] = []
    hook = pipe.transformer.register_forward_hook(
        lambda _, __, given, result: calls.append((given, result[0])), with_kwargs=True
    )
    with encoded_references(pipe) as references:
        pipe(pictures(1)[0], "a cat", height=TARGET.height, width=TARGET.width, num_inference_steps=2)
    hook.remove()
    assert (len(references), len(calls)) == (1, 2)

    batch_conditions = {**conditions(family), "references": (references[0].squeeze(2),)}
    shape = family.latent_shape(TARGET)
    for theirs, result in calls:
        ours = Recording(pipe.transformer)
        noisy = latent(theirs["hidden_states"], shape)
        prediction = family.denoiser.predict(ours, noisy, 1000 * theirs["timestep"], batch_conditions)
        ((own, _),) = ours.calls
        assert theirs.keys() - own.keys() == {"guidance", "attention_kwargs"}
        for name, value in own.items():
            torch.testing.assert_close(value, theirs[name], rtol=0.0, atol=1e-6)
        torch.testing.assert_close(prediction.detach(), latent(result, shape), **TOLERANCE)


def test_the_loss_ignores_the_predictions_for_the_reference(loaded: tuple[WorkerFamily, Any]) -> None:
    check_loss(*loaded)


def test_height_and_width_of_a_reference_change_the_prediction(loaded: tuple[WorkerFamily, Any]) -> None:
    check_order(*loaded, number=1)


def test_a_preview_equals_the_picture_of_the_pipeline(loaded: tuple[WorkerFamily, Any]) -> None:
    family, pipe = loaded
    (image,) = pictures(1)
    encoders = family.text.load("float32", "cpu")
    text, empty = (family.text.encode_caption(encoders, each, seen(image)).tensors for each in ("a cat", ""))
    pipeline = family.drawing.load_pipeline(dtype="float32", device="cpu")
    settings = PictureSettings(Size(64, 96), steps=2, seed=1)
    preview = family.drawing.draw(pipeline, text, empty, settings, references=[image])
    arguments = {"height": 64, "width": 96, "num_inference_steps": 2, "true_cfg_scale": 4.0}
    generator = torch.Generator().manual_seed(1)
    (expected,), *_ = pipe(
        image,
        "a cat",
        negative_prompt="",
        **arguments,
        generator=generator,
        output_type="np",
        return_dict=False,
    )
    np.testing.assert_allclose(np.asarray(preview) / 255, expected, atol=0.6 / 255)
