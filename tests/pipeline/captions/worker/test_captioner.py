from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torchao.quantization import Int8WeightOnlyConfig
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    Qwen2VLImageProcessorPil,
    TorchAoConfig,
    pipeline,
)

from pipeline.captions.worker.captioner import Captioner
from pipeline.errors import ModelError
from tests.pipeline.captions.conftest import picture

PROMPT = "a photo of"
MAX_TOKENS = 8


def by_pipeline(
    folder: Path, image: Any, *, backend: str | None, before: Sequence[dict[str, Any]] = (), **load: Any
) -> str:
    """Return the text of transformers' own pipeline for this task."""
    with torch.inference_mode():
        processor: Any = AutoProcessor.from_pretrained(folder, **({"backend": backend} if backend else {}))
        if backend is None:
            processor.image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, **load)
        captions: Any = pipeline("image-text-to-text", model=model, processor=processor)
        options: dict[str, Any] = {
            "return_full_text": False,
            "generate_kwargs": {"do_sample": False, "max_new_tokens": MAX_TOKENS},
        }
        if processor.chat_template is None:
            return captions(images=image, text=PROMPT, **options)[0]["generated_text"]
        content = [{"type": "image", "image": image}, {"type": "text", "text": PROMPT}]
        return captions(text=[*before, {"role": "user", "content": content}], **options)[0]["generated_text"]


def by_parts(folder: Path, image: Any) -> str:
    """Return the text of a Qwen-VL from its tokenizer and its image processor for Pillow.

    The mark of an image stands for one token for each square of four patches.
    """
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    pixels = processor(images=[image], return_tensors="pt")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    content = [{"type": "image"}, {"type": "text", "text": PROMPT}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    assert text.count("<|image_pad|>") == 1
    num_tokens = int(pixels["image_grid_thw"][0].prod()) // 4
    ids = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * num_tokens), return_tensors="pt")
    is_image = ids["input_ids"] == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        output = model.generate(
            **ids, **pixels, mm_token_type_ids=is_image.int(), do_sample=False, max_new_tokens=MAX_TOKENS
        )
    return tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def assert_batches_equal_singles(model: Captioner) -> str:
    """Assert that the captions of three images depend on nothing but the image, and return the first text."""
    images = [picture(seed) for seed in range(3)]
    singles = [model.captions([image], PROMPT, MAX_TOKENS)[0] for image in images]
    assert len({text for text, _, _ in singles}) > 1, "the model does not look at the image"
    assert all(0 < num_tokens <= MAX_TOKENS for _, num_tokens, _ in singles)
    assert model.captions(images, PROMPT, MAX_TOKENS) == singles
    return singles[0][0]


@pytest.mark.parametrize("name", ["idefics3", "blip", "blip2", "florence2"])
def test_a_caption_is_the_text_of_the_pipeline_and_batches_equal_singles(
    captioner: Callable[[str], Path], name: str
) -> None:
    text = assert_batches_equal_singles(Captioner(captioner(name), "float32", "cpu"))
    assert text == by_pipeline(captioner(name), picture(0), backend="pil")


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_a_model_that_also_reads_videos_captions_images_without_torchvision(
    captioner: Callable[[str], Path], name: str
) -> None:
    text = assert_batches_equal_singles(Captioner(captioner(name), "float32", "cpu"))
    assert text == by_parts(captioner(name), picture(0))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_such_a_caption_is_the_text_of_the_pipeline_with_its_processor_of_videos(
    captioner: Callable[[str], Path], name: str
) -> None:
    pytest.importorskip("torchvision")
    text = assert_batches_equal_singles(Captioner(captioner(name), "float32", "cpu"))
    assert text == by_pipeline(captioner(name), picture(0), backend=None)


def test_examples_are_earlier_messages_of_the_chat(captioner: Callable[[str], Path]) -> None:
    folder = captioner("idefics3")
    model = Captioner(folder, "float32", "cpu")
    shown, images = picture(8, 50, 20), [picture(seed) for seed in range(3)]
    examples = [(shown, "a red rose"), (None, "a lily at night")]
    singles = [model.captions([image], PROMPT, MAX_TOKENS, examples)[0] for image in images]
    assert model.captions(images, PROMPT, MAX_TOKENS, examples) == singles
    assert singles != [model.captions([image], PROMPT, MAX_TOKENS)[0] for image in images]

    prompt = {"type": "text", "text": PROMPT}
    before = [
        {"role": "user", "content": [{"type": "image", "image": shown}, prompt]},
        {"role": "assistant", "content": [{"type": "text", "text": "a red rose"}]},
        {"role": "user", "content": [prompt]},
        {"role": "assistant", "content": [{"type": "text", "text": "a lily at night"}]},
    ]
    assert singles[0][0] == by_pipeline(folder, images[0], backend="pil", before=before)


def test_a_quantized_model_writes_what_transformers_writes_with_it(captioner: Callable[[str], Path]) -> None:
    folder, images = captioner("idefics3"), [picture(seed) for seed in range(3)]
    model = Captioner(folder, "float32", "cpu", quantize="int8")
    singles = [model.captions([image], PROMPT, MAX_TOKENS)[0] for image in images]
    assert model.captions(images, PROMPT, MAX_TOKENS) == singles
    quantization = TorchAoConfig(Int8WeightOnlyConfig())
    by_transformers = [
        by_pipeline(folder, image, backend="pil", quantization_config=quantization) for image in images
    ]
    assert [text for text, _, _ in singles] == by_transformers
    exact = Captioner(folder, "float32", "cpu").captions(images, PROMPT, MAX_TOKENS)
    assert singles != exact, "nothing was rounded"


def test_a_caption_is_cut_off_if_the_model_does_not_end_it(
    captioner: Callable[[str], Path], tmp_path: Path
) -> None:
    model = Captioner(captioner("idefics3"), "float32", "cpu")
    _, num_tokens, cut = model.captions([picture(0)], PROMPT, 3)[0]
    assert (num_tokens, cut) == (3, True)

    # Every token ends the text.
    folder = tmp_path / "ends"
    shutil.copytree(captioner("idefics3"), folder)
    config = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    config["eos_token_id"] = list(range(2000))
    (folder / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    _, num_tokens, cut = Captioner(folder, "float32", "cpu").captions([picture(0)], PROMPT, 3)[0]
    assert (num_tokens, cut) == (0, False)


def test_a_model_of_another_kind_is_refused_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    with pytest.raises(ModelError, match="the captioning model cannot be loaded") as caught:
        Captioner(tmp_path, "float32", "cpu")
    assert str(tmp_path) in caught.value.where


NUM2WORDS = "transformers.models.smolvlm.processing_smolvlm.num2words"
"""The function of the package num2words, or None without it; it writes numbers of frames of videos."""


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    captioner: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NUM2WORDS, None)
    with pytest.raises(ModelError, match="Package `num2words` is required") as caught:
        Captioner(captioner("smolvlm"), "float32", "cpu")
    assert caught.value.fix == "pip install num2words"


def test_smolvlm_captions_like_idefics3_with_the_same_weights_without_torchvision(
    captioner: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NUM2WORDS, str)
    text = assert_batches_equal_singles(Captioner(captioner("smolvlm"), "float32", "cpu"))
    assert text == by_pipeline(captioner("idefics3"), picture(0), backend="pil")
