from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from diffusers import QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as edit_plus
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import BatchFeature, Qwen2TokenizerFast, Qwen2VLImageProcessorPil

from demo.tiny_models import make_tiny_qwen_image_edit
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cache.store import EntrySpec
from pipeline.errors import BucketError
from pipeline.images.geometry import Size
from pipeline.models.families.parts.references import QWEN_EDIT_REFERENCES
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.models.worker.inference import PictureSettings
from pipeline.models.worker.text import SeenImage
from pipeline.text_embeddings.caption_rows import file_images
from pipeline.trained_lora.worker.micro_input import MicroInput
from tests.pipeline.models.families.case import Case
from tests.pipeline.models.families.complete_job import TOLERANCE, settings
from tests.pipeline.models.families.qwen_image_case import QwenImageCase
from tests.pipeline.models.families.references_case import (
    check_calls,
    check_loss,
    check_order,
    encoded_references,
    pictures,
)

VAE_PX = 96 * 96
"""Area of references in this file, in place of a megapixel."""

UNUSED = ("guidance", "attention_kwargs")
TEXT_IMAGES = QWEN_EDIT_REFERENCES.in_text
assert TEXT_IMAGES is not None


class Processor:
    """The real tokenizer and image processor, combined as `Qwen2VLProcessor` documents."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Qwen2TokenizerFast.from_pretrained(folder)
        self.images = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def __call__(self, text: list[str], images: Any, *, padding: bool, return_tensors: str) -> BatchFeature:
        (prompt,) = text
        features: dict[str, Any] = {}
        if images is not None:
            features = dict(self.images(images=images, return_tensors=return_tensors))
            start, *parts = re.split(r"<\|image_pad\|>", prompt)
            numbers = [int(height * width) // 4 for _, height, width in features["image_grid_thw"]]
            marks = ["<|image_pad|>" * number for number in numbers]
            prompt = start + "".join(mark + part for mark, part in zip(marks, parts, strict=True))
        tokens = self.tokenizer([prompt], padding=padding, return_tensors=return_tensors)
        return BatchFeature({**tokens, **features})


def seen(images: list[Image.Image]) -> list[SeenImage]:
    assert TEXT_IMAGES is not None
    return [SeenImage(each, TEXT_IMAGES.size(Size(each.height, each.width))) for each in images]


class QwenImageEditCase(QwenImageCase):
    """Qwen-Image-Edit with one reference, which is the same for all samples."""

    pipeline_class = QwenImageEditPlusPipeline
    drawing: ClassVar[dict[str, Any]] = {"image": pictures(1)}

    def __init__(self) -> None:
        self.seen = seen(pictures(1))

    def sections(self, folder: Path, photos: Path) -> dict[str, Any]:
        (image,) = pictures(1)
        (folder / "before").mkdir()
        files = [folder / "before" / f"{path.stem}.png" for path in photos.iterdir()]
        for file in files:
            image.save(file)
        references = [{"path": str(folder / "before"), "resolution": 96}]
        dataset = {"name": "photos", "path": str(photos), "references": references}
        training = settings(folder, photos, folder)["training"]
        self.reference = files[0]
        prompt = {"prompt": "a cat", "references": [str(self.reference)]}
        return {"datasets": [dataset], "training": {**training, "sample_prompts": [prompt]}}

    def text_spec(self, entries: RecipeEntries, caption: str) -> EntrySpec:
        images, _ = file_images(entries, [self.reference])
        return entries.text_spec(caption, images=images)

    def make(self, folder: Path) -> None:
        make_tiny_qwen_image_edit(folder)

    def pipeline(self, folder: Path, **parts: Any) -> Any:
        pipe = super().pipeline(folder, processor=None, **parts)
        pipe.register_modules(processor=Processor(folder / "processor"))
        return pipe

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        images = [pipe.image_processor.resize(each.image, *each.size) for each in self.seen]
        embedding, mask = pipe.encode_prompt(caption, image=images)
        assert mask is None
        return {"text_embedding": embedding, "text_mask": torch.ones(embedding.shape[:2])}

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        """Predict each sample alone; tokens are 2x2 patches in row order, those of references last."""
        height, width = noisy.shape[2:]
        (references,) = micro.conditions["references"]
        predictions: list[torch.Tensor] = []
        for index, text in enumerate(micro.conditions["text_embedding"]):
            images = [each[index : index + 1] for each in (noisy, references)]
            patches = [torch.nn.functional.unfold(each, 2, stride=2).transpose(1, 2) for each in images]
            length = int(micro.conditions["text_mask"][index].sum())
            tokens = pipe.transformer(
                torch.cat(patches, dim=1),
                encoder_hidden_states=text[None, :length],
                timestep=micro.timesteps[index : index + 1] / 1000,
                img_shapes=[[(1, each.shape[2] // 2, each.shape[3] // 2) for each in images]],
            ).sample[:, : patches[0].shape[1]]
            predictions.append(torch.nn.functional.fold(tokens.transpose(1, 2), (height, width), 2, stride=2))
        return torch.cat(predictions)


def test_the_complete_job_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edit_plus, "VAE_IMAGE_SIZE", VAE_PX)
    check_family(QwenImageEditCase())


@pytest.fixture(scope="module", params=[True, False], ids=["zero_cond_t", "plain"])
def loaded(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WorkerFamily, Any]]:
    """Yield the tiny model and its complete pipeline, with small references."""
    folder = tmp_path_factory.mktemp("base")
    make_tiny_qwen_image_edit(folder, zero_cond_t=request.param)
    pipe = QwenImageEditCase().pipeline(folder)
    pipe.set_progress_bar_config(disable=True)
    assert pipe.transformer.zero_cond_t == request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edit_plus, "VAE_IMAGE_SIZE", VAE_PX)
        yield load_family(folder), pipe


def conditions(family: WorkerFamily, images: list[Image.Image], caption: str = "a cat") -> dict[str, Any]:
    encoders = family.text.load("float32", "cpu")
    return family.text.stack([family.text.encode_caption(encoders, caption, seen(images)).tensors])


@given(height=st.integers(16, 6000), width=st.integers(16, 6000))
def test_references_have_the_sizes_of_the_pipeline(height: int, width: int) -> None:
    assert TEXT_IMAGES is not None
    original = Size(height, width)
    if max(original) > 200 * min(original):
        with pytest.raises(BucketError, match="at most 200:1"):
            QWEN_EDIT_REFERENCES.size(None, original)  # pyright: ignore[reportArgumentType] - unused
        return
    size = QWEN_EDIT_REFERENCES.size(None, original)  # pyright: ignore[reportArgumentType] - unused
    assert (size.width, size.height) == edit_plus.calculate_dimensions(1024 * 1024, width / height)
    size = TEXT_IMAGES.size(original)
    assert (size.width, size.height) == edit_plus.calculate_dimensions(
        edit_plus.CONDITION_IMAGE_SIZE, width / height
    )
    grid = Qwen2VLImageProcessorPil().get_number_of_image_patches(*size)
    assert grid // 4 <= 256


def test_the_latent_of_a_reference_is_that_of_the_pipeline(loaded: tuple[WorkerFamily, Any]) -> None:
    family, pipe = loaded
    images = pictures(3)
    with encoded_references(pipe) as encoded:
        pipe(prompt="a cat", image=images, height=64, width=64, num_inference_steps=1)
    vae = family.vae.load("float32", "cpu")
    assert len(encoded) == 3
    for image, expected in zip(images, encoded, strict=True):
        width, height = edit_plus.calculate_dimensions(VAE_PX, image.width / image.height)
        pixels = pipe.image_processor.preprocess(image, height, width)
        actual = family.vae.normalise(family.vae.posterior(vae, pixels).mean)
        assert actual.std() > 0.1
        torch.testing.assert_close(actual, expected[:, :, 0], **TOLERANCE)


@pytest.mark.parametrize("caption", ["a cat", ""])
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_embeddings_of_captions_with_references_are_those_of_the_pipeline(
    loaded: tuple[WorkerFamily, Any], number: int, caption: str
) -> None:
    family, pipe = loaded
    images = pictures(number)
    resized = [pipe.image_processor.resize(each.image, *each.size) for each in seen(images)]
    with torch.no_grad():
        expected, mask = pipe.encode_prompt(caption, image=resized or None)
    assert mask is None
    ours = conditions(family, images, caption)["text_embedding"]
    assert ours.std() > 0.1
    torch.testing.assert_close(ours, expected, **TOLERANCE)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_training_calls_the_transformer_as_each_step_of_the_pipeline_does(
    loaded: tuple[WorkerFamily, Any], number: int
) -> None:
    family, pipe = loaded
    caption = conditions(family, pictures(number))
    check_calls(family, pipe, number=number, caption=caption, unused=UNUSED)


def test_the_loss_ignores_the_predictions_for_references(loaded: tuple[WorkerFamily, Any]) -> None:
    check_loss(*loaded)


@pytest.mark.parametrize("number", [1, 3])
def test_order_height_and_width_of_references_change_the_prediction(
    loaded: tuple[WorkerFamily, Any], number: int
) -> None:
    check_order(*loaded, number=number)


def test_order_and_size_of_references_change_the_embeddings(loaded: tuple[WorkerFamily, Any]) -> None:
    family, _ = loaded
    one, two, _ = pictures(3)
    base = conditions(family, [one, two])["text_embedding"]
    swapped = conditions(family, [two, one])["text_embedding"]
    turned = conditions(family, [one.transpose(Image.Transpose.TRANSPOSE), two])["text_embedding"]
    for other in (swapped, turned):
        assert other.shape != base.shape or (other - base).abs().max() > 1e-3
    assert conditions(family, [one])["text_embedding"].shape[1] < base.shape[1]


@pytest.mark.parametrize("number", [1, 3])
def test_a_preview_with_references_equals_the_picture_of_the_pipeline(
    loaded: tuple[WorkerFamily, Any], number: int
) -> None:
    family, pipe = loaded
    encoders = family.text.load("float32", "cpu")
    images = pictures(number)
    text, empty = (family.text.encode_caption(encoders, each, seen(images)).tensors for each in ("a cat", ""))
    pipeline = family.drawing.load_pipeline(dtype="float32", device="cpu")
    settings = PictureSettings(Size(64, 96), steps=2, seed=1)
    preview = family.drawing.draw(pipeline, text, empty, settings, negative_text=empty, references=images)
    arguments = {
        "height": 64,
        "width": 96,
        "num_inference_steps": 2,
        "true_cfg_scale": family.spec.guidance_scale,
    }
    generator = torch.Generator().manual_seed(1)
    (expected,), *_ = pipe(
        images,
        "a cat",
        negative_prompt="",
        **arguments,
        generator=generator,
        output_type="np",
        return_dict=False,
    )
    np.testing.assert_allclose(np.asarray(preview) / 255, expected, atol=0.6 / 255)


def test_a_long_caption_is_cut_where_the_report_says_and_keeps_the_end_of_the_template(
    loaded: tuple[WorkerFamily, Any],
) -> None:
    family, _ = loaded
    encoders = family.text.load("float32", "cpu")
    caption = "a cat " * 600
    encoded = family.text.encode_caption(encoders, caption)
    assert encoded.cut_from is not None
    assert encoded.num_tokens - encoded.num_cut <= family.max_length() == 1024
    kept = family.text.encode_caption(encoders, caption[: encoded.cut_from])
    assert kept.num_cut == 0
    assert torch.equal(kept.tensors["text_embedding"], encoded.tensors["text_embedding"])


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed")
def test_our_processor_gives_the_inputs_of_the_complete_one(loaded: tuple[WorkerFamily, Any]) -> None:
    from transformers import Qwen2VLProcessor, Qwen2VLVideoProcessor

    family, _ = loaded
    folder = family.model.component("processor")
    images = Qwen2VLImageProcessorPil.from_pretrained(folder)
    tokenizer = Qwen2TokenizerFast.from_pretrained(folder)
    complete = Qwen2VLProcessor(images, tokenizer, Qwen2VLVideoProcessor())
    text = ["".join(f"Picture {n}: <|vision_start|><|image_pad|><|vision_end|>" for n in (1, 2)) + "a cat"]
    arguments = {"text": text, "images": pictures(2), "padding": True, "return_tensors": "pt"}
    ours, theirs = family.text.load_tokenizer("processor")(**arguments), complete(**arguments)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name])
