from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import polars as pl
import pytest
import torch
from diffusers import QwenImage21Pipeline
from diffusers.pipelines.qwenimage21 import pipeline_qwenimage21 as qwenimage21
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from demo.tiny_models import make_tiny_qwen_image21
from pipeline.cache.entry_format import TEXT
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.errors import BucketError
from pipeline.images.geometry import Size
from pipeline.models.families.parts.references import QWEN_IMAGE21_REFERENCES
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.models.worker.inference import PictureSettings
from pipeline.recipe import recipe_from_mapping
from pipeline.side_inputs import REFERENCES
from pipeline.side_inputs.references import IMAGES, reference_geometry
from pipeline.text_embeddings.caption_rows import file_images
from pipeline.trained_lora.export.lora_files import read_lora_file
from pipeline.trained_lora.export.metadata import READERS_KEY
from tests.pipeline.models.families.case import Case
from tests.pipeline.models.families.complete_job import TOLERANCE, check_drawing, settings
from tests.pipeline.models.families.qwen_image21_case import (
    QwenImage21Case,
    QwenImage21EditCase,
    seen,
    small_references,
)
from tests.pipeline.models.families.references_case import (
    Recording,
    check_loss,
    check_order,
    encoded_references,
    pictures,
)
from tests.tensor_differences import differing_tensors

Loaded: TypeAlias = tuple[WorkerFamily, QwenImage21Pipeline]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny_qwen_image21(tmp_path / "base")
    return tmp_path / "base"


def test_the_complete_job_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None], tmp_path: Path
) -> None:
    check_family(QwenImage21Case())
    metadata = read_lora_file(tmp_path / "output" / "lora" / "demo_kohya.safetensors").metadata
    assert "name ends in _comfyui" in metadata[READERS_KEY]


def test_the_complete_job_with_references_equals_diffusers(check_family: Callable[[Case], None]) -> None:
    with small_references():
        check_family(QwenImage21EditCase())


def test_previews_of_turbo_are_drawn_at_its_published_noise_levels(tmp_path: Path) -> None:
    case = QwenImage21Case(turbo=True)
    case.make(tmp_path)
    family, pipe = load_family(tmp_path), case.pipeline(tmp_path)
    check_drawing(case, family, pipe)
    assert (pipe.scheduler.timesteps / 1000).tolist() == pytest.approx(pipe.config.sample_sigmas)
    assert len(pipe.config.sample_sigmas) == 8  # also if a preview has another number of steps

    levels = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    timesteps = family.noise.timesteps(family.noise.load_scheduler(), levels, (64, 64, 64))
    torch.testing.assert_close(timesteps, (1000 * levels).float())


def test_training_calls_the_transformer_as_each_step_of_the_pipeline_does(folder: Path) -> None:
    """The pipeline computes keys and values of the caption in its first step only."""
    family, pipe = load_family(folder), QwenImage21Case().pipeline(folder)
    calls: list[tuple[dict[str, Any], torch.Tensor]] = []
    hook = pipe.transformer.register_forward_hook(
        lambda _, __, arguments, result: calls.append((arguments, result[0])), with_kwargs=True
    )
    pipe("a cat", height=64, width=96, num_inference_steps=3, generator=torch.Generator().manual_seed(1))
    drawn = calls.copy()
    assert [arguments["kv_cache_mode"] for arguments, _ in drawn] == ["extract", "cached", "cached"]

    encoders = family.text.load("float32", "cpu")
    conditions = family.text.stack([family.text.encode_caption(encoders, "a cat").tensors])
    for arguments, result in drawn:
        calls.clear()
        noisy = arguments["hidden_states"].mT.reshape(1, 64, 4, 6)
        with torch.no_grad():
            prediction = family.denoiser.predict(
                pipe.transformer, noisy, 1000 * arguments["timestep"], conditions
            )
        ((ours, _),) = calls
        for name in ours:
            torch.testing.assert_close(ours[name], arguments[name], rtol=0.0, atol=1e-6)
        assert arguments.keys() - ours.keys() == {"attention_kwargs", "kv_cache", "kv_cache_mode"}
        torch.testing.assert_close(prediction, result[:, -24:].mT.reshape(1, 64, 4, 6), **TOLERANCE)
    hook.remove()

    levels = torch.linspace(1, 1 / 3, 3, dtype=torch.float64)
    timesteps = family.noise.timesteps(family.noise.load_scheduler(), levels, (64, 4, 6))
    torch.testing.assert_close(timesteps, pipe.scheduler.timesteps)


@pytest.mark.parametrize("extra", [0, 1, 5])
def test_a_caption_is_cut_before_the_end_of_the_template(folder: Path, extra: int) -> None:
    family, pipe = load_family(folder), QwenImage21Case().pipeline(folder)
    encoders = family.text.load("float32", "cpu")
    num_words = 2048 - pipe.encode_prompt("cat")[0].shape[1] + len("cat") + extra  # letters are tokens
    caption = "cat" + " cat" * (num_words - len("cat"))
    encoded = family.text.encode_caption(encoders, caption)
    assert encoded.num_cut == extra
    assert encoded.cut_from == (len(caption) - len(" cat") * extra if extra else None)
    assert encoded.num_tokens == 2048 + pipe._drop_idx + extra
    embedding, *_ = pipe.encode_prompt(caption[: encoded.cut_from])
    torch.testing.assert_close(encoded.tensors["text_embedding"], embedding[0], **TOLERANCE)


def test_a_caption_may_contain_the_mark_of_a_condition_image(folder: Path) -> None:
    """The pipeline's own processor would ask for the image."""
    family = load_family(folder)
    encoded = family.text.encode_caption(family.text.load("float32", "cpu"), "a <|image_pad|> cat")
    assert encoded.tensors["text_embedding"].isfinite().all()


def test_both_edges_of_a_latent_are_even(folder: Path) -> None:
    family = load_family(folder)
    assert family.size_multiple() == 32
    assert family.latent_shape(Size(64, 96)) == (64, 4, 6)


def test_the_tokenizer_alone_encodes_captions_as_the_complete_processor(folder: Path) -> None:
    pytest.importorskip("torchvision")
    from transformers import Qwen3VLProcessor

    processor = Qwen3VLProcessor.from_pretrained(folder / "processor")
    encoders = load_family(folder).text.load("float32", "cpu")
    message: Any = [{"role": "system", "content": [{"type": "text", "text": encoders.sys_prompt}]}]
    options: dict[str, Any] = {"padding": True, "padding_side": "left", "return_tensors": "pt"}
    prompts = [encoders.prompt_template_t2i.format(caption) for caption in ("a cat", "a white cat on a wall")]
    expected, actual = (
        (each.apply_chat_template(message, tokenize=True), each(text=prompts, **options))
        for each in (processor, encoders.processor)
    )
    assert actual[0] == expected[0]
    tokens = [
        {name: each[1][name] for name in ("input_ids", "attention_mask")} for each in (actual, expected)
    ]
    assert differing_tensors(*tokens) == []


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """Yield the tiny model and its complete pipeline, with small references."""
    folder = tmp_path_factory.mktemp("base")
    make_tiny_qwen_image21(folder)
    pipe = QwenImage21Case().pipeline(folder)
    pipe.set_progress_bar_config(disable=True)
    with small_references():
        yield load_family(folder), pipe


def conditions(family: WorkerFamily, *images: Image.Image, captions: Sequence[str] = ("a cat",)) -> Any:
    encoders = family.text.load("float32", "cpu")
    texts = [family.text.encode_caption(encoders, each, seen([*images])).tensors for each in captions]
    return family.text.stack(texts)


@given(height=st.integers(16, 6000), width=st.integers(16, 6000))
def test_references_have_the_sizes_of_the_pipeline(height: int, width: int) -> None:
    original, spec = Size(height, width), QWEN_IMAGE21_REFERENCES
    assert spec.in_text is not None
    if max(original) > 200 * min(original):
        with pytest.raises(BucketError, match="at most 200:1"):
            spec.size(None, original)  # pyright: ignore[reportArgumentType] - unused
        return
    size = spec.size(None, original)  # pyright: ignore[reportArgumentType] - unused
    assert (size.width, size.height) == qwenimage21.calculate_dimensions(1024 * 1024, width / height)[:2]
    assert spec.in_text.size(original) == size


def test_the_latent_of_a_reference_is_that_of_the_pipeline(loaded: Loaded) -> None:
    family, pipe = loaded
    images = pictures(3)
    with encoded_references(pipe) as encoded:
        pipe(prompt="a cat", image=images, height=64, width=64, num_inference_steps=1)
    vae = family.vae.load("float32", "cpu")
    assert len(encoded) == 3
    for each, expected in zip(seen(images), encoded, strict=True):
        pixels = pipe.image_processor.preprocess(each.image, *each.size)
        actual = family.vae.normalise(family.vae.posterior(vae, pixels).mean)
        assert actual.std() > 0.1
        torch.testing.assert_close(actual, expected[:, :, 0], **TOLERANCE)


@pytest.mark.parametrize("caption", ["a cat", ""])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_embeddings_of_captions_with_references_are_those_of_the_pipeline(
    loaded: Loaded, number: int, caption: str
) -> None:
    family, pipe = loaded
    images = pictures(number)
    resized = [pipe.image_processor.resize(each.image.convert("RGBA"), *each.size) for each in seen(images)]
    with torch.no_grad():
        expected, _, is_image = pipe.encode_prompt(caption, image=resized)
    ours = conditions(family, *images, captions=[caption])["text_embedding"]
    assert ours.std() > 0.01
    torch.testing.assert_close(ours, expected[:, ~is_image[0]], **TOLERANCE)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_training_with_references_calls_the_transformer_as_each_step_of_the_pipeline_does(
    loaded: Loaded, number: int
) -> None:
    """The transformer replaces the embeddings of images by latents, so ours are zeros there."""
    family, pipe = loaded
    images, drawn = pictures(number), Recording(pipe.transformer)
    hook = pipe.transformer.register_forward_hook(
        lambda _, __, arguments, result: drawn.calls.append((arguments, result[0])), with_kwargs=True
    )
    with encoded_references(pipe) as references:
        pipe("a cat", images, height=64, width=96, num_inference_steps=3)
    hook.remove()
    assert [arguments["kv_cache_mode"] for arguments, _ in drawn.calls] == ["extract", "cached", "cached"]

    caption = {**conditions(family, *images), "references": tuple(each.squeeze(2) for each in references)}
    for arguments, result in drawn.calls:
        noisy = arguments["hidden_states"][:, -24:].mT.reshape(1, 64, 4, 6)
        ours = Recording(pipe.transformer)
        prediction = family.denoiser.predict(ours, noisy, 1000 * arguments["timestep"], caption)
        ((own, _),) = ours.calls
        assert arguments.keys() - own.keys() == {"attention_kwargs", "kv_cache", "kv_cache_mode"}
        is_image = arguments["img_mask"][:, : own["encoder_hidden_states"].shape[1]]
        assert int(is_image.sum()) == sum(each[0, 0].numel() // 4 for each in references)
        arguments["encoder_hidden_states"] = arguments["encoder_hidden_states"].masked_fill(
            is_image[..., None], 0
        )
        for name, value in own.items():
            torch.testing.assert_close(value, arguments[name], rtol=0.0, atol=1e-5)
        expected = result[:, -24:].mT.reshape(1, 64, 4, 6)
        torch.testing.assert_close(prediction.detach(), expected, **TOLERANCE)


def test_the_loss_ignores_the_predictions_for_references_and_text(loaded: Loaded) -> None:
    family, pipe = loaded
    check_loss(family, pipe, caption=conditions(family, *pictures(1)), target_last=True)


@pytest.mark.parametrize("captions", [("a cat", "a dog"), ("a cat", "a white cat on a wall")])
@pytest.mark.parametrize("number", [1, 3])
def test_order_height_and_width_of_references_change_the_prediction(
    loaded: Loaded, number: int, captions: Sequence[str]
) -> None:
    family, pipe = loaded
    two = conditions(family, *pictures(number), captions=captions)
    check_order(family, pipe, number=number, captions=two)


def test_order_and_size_of_references_change_the_embeddings(loaded: Loaded) -> None:
    family, _ = loaded
    one, two, _ = pictures(3)
    base = conditions(family, one, two)["text_embedding"]
    swapped = conditions(family, two, one)["text_embedding"]
    turned = conditions(family, one.transpose(Image.Transpose.TRANSPOSE), two)["text_embedding"]
    for other in (swapped, turned):
        assert (other - base).abs().max() > 1e-3
    assert conditions(family)["text_embedding"].shape[1] < base.shape[1] - 2 * 7


def test_order_height_and_width_of_references_change_the_keys_of_captions_and_latents(
    folder: Path, tmp_path: Path
) -> None:
    one, two, _ = pictures(3)
    files = [tmp_path / name for name in ("one.png", "two.png", "turned.png")]
    for image, file in zip((one, two, one.transpose(Image.Transpose.TRANSPOSE)), files, strict=True):
        image.save(file)
    plain = settings(tmp_path, tmp_path / "photos", folder)
    (tmp_path / "photos").mkdir()
    dataset = {**plain["datasets"][0], "references": [{"path": tmp_path / "a"}, {"path": tmp_path / "b"}]}
    entries = RecipeEntries(recipe_from_mapping("demo", {**plain, "datasets": [dataset]}))
    orders = [[files[0], files[1]], [files[1], files[0]], [files[2], files[1]], [files[0]]]
    texts = {entries.text_spec("a cat", images=file_images(entries, order)[0]).key for order in orders}
    without = RecipeEntries(recipe_from_mapping("demo", plain)).text_spec("a cat").key
    assert len(texts) == len(orders)
    assert entries.text_spec("a cat").key == without not in texts

    geometry = [reference_geometry(entries.family, Size(*size)) for size in ((64, 160), (160, 64))]
    assert geometry[0].target_size == Size(*reversed(geometry[1].target_size))
    assert geometry[0].target_size != geometry[1].target_size
    images = [
        {"path": file.name, "hash": "0" * 64, "height": height, "width": width}
        for file, (height, width) in zip(files, ((64, 160), (160, 64)), strict=False)
    ]
    row = {"sample_id": "photos/cat.png", "dataset": "photos", "bucket": "64x64", "flipped": False}
    rows = [pl.DataFrame({**row, IMAGES: json.dumps(order)}) for order in (images, images[::-1])]
    keys = [REFERENCES.keys(entries, each).item() for each in rows]
    assert keys[0].split() == keys[1].split()[::-1]
    assert keys[0] != keys[1]


@pytest.mark.parametrize("number", [1, 3])
def test_a_preview_with_references_equals_the_picture_of_the_pipeline(loaded: Loaded, number: int) -> None:
    family, pipe = loaded
    encoders = family.text.load("float32", "cpu")
    images, captions = pictures(number), ("a cat", "a red dog")
    text, negative = (family.text.encode_caption(encoders, each, seen(images)).tensors for each in captions)
    pipeline = family.drawing.load_pipeline(dtype="float32", device="cpu")
    guided = PictureSettings(Size(64, 96), steps=2, seed=1, guidance_scale=3.0)
    preview = family.drawing.draw(pipeline, text, negative, guided, negative_text=negative, references=images)
    arguments: dict[str, Any] = {"height": 64, "width": 96, "num_inference_steps": 2, "true_cfg_scale": 3.0}
    generator = torch.Generator().manual_seed(1)
    drawn = pipe("a cat", images, "a red dog", **arguments, generator=generator, output_type="np")
    np.testing.assert_allclose(np.asarray(preview) / 255, drawn.images[0], atol=0.6 / 255)

    # The same pipeline then draws without references.
    text, empty = (family.text.encode_caption(encoders, each).tensors for each in ("a cat", ""))
    plain = family.drawing.draw(pipeline, text, empty, PictureSettings(Size(64, 96), steps=2, seed=1))
    arguments["true_cfg_scale"] = 1.0
    drawn = pipe("a cat", **arguments, generator=torch.Generator().manual_seed(1), output_type="np")
    np.testing.assert_allclose(np.asarray(plain) / 255, drawn.images[0], atol=0.6 / 255)


def test_a_long_caption_with_references_loses_the_same_end_as_without_them(
    loaded: Loaded,
) -> None:
    family, _ = loaded
    encoders, images = family.text.load("float32", "cpu"), seen(pictures(3))
    plain = family.text.encode_caption(encoders, " cat" * 2100)
    encoded = family.text.encode_caption(encoders, " cat" * 2100, images)
    assert encoded.cut_from == plain.cut_from
    assert encoded.num_cut == plain.num_cut > 0
    assert family.max_length() < len(encoded.tensors["text_embedding"]) <= family.text_shapes()[TEXT][0]


def test_captions_without_references_need_no_image_processor(tmp_path: Path) -> None:
    make_tiny_qwen_image21(tmp_path)
    (tmp_path / "processor" / "preprocessor_config.json").unlink()
    assert conditions(load_family(tmp_path))["text_embedding"].isfinite().all()


def test_our_processor_gives_the_inputs_of_the_complete_one_for_references(folder: Path) -> None:
    pytest.importorskip("torchvision")
    from transformers import Qwen3VLProcessor

    complete: Any = Qwen3VLProcessor.from_pretrained(folder / "processor")
    marks = " ".join(f"<image{n}><|vision_start|><|image_pad|><|vision_end|>" for n in (1, 2))
    arguments: dict[str, Any] = {
        "text": [f"{marks}a cat"],
        "images": pictures(2),
        "padding": True,
        "return_tensors": "pt",
    }
    ours, theirs = load_family(folder).text.load_tokenizer("processor")(**arguments), complete(**arguments)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], check_dtype=False)
