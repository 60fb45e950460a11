"""Tiny captioning models with random weights: Idefics3, SmolVLM, BLIP, BLIP-2, Florence-2, Qwen-VL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from demo.tiny_models.language import byte_level, qwen2_5_vl, qwen3_vl, vocabulary, write_qwen_tokenizer
from demo.tiny_models.parts import write_json
from pipeline.storage.atomic import write_text

_START, _END, _PAD, _IMAGE = "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<image>"
_MARKS = (_PAD, _START, _END, _IMAGE)

_IDEFICS3_MARKS = (*_MARKS, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")

_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def _template(image: str) -> str:
    """Return a chat template whose messages consist of parts, with this text in place of an image."""
    return (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
        "{% if part.type == 'image' %}"
        + image
        + "{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def write_idefics3(folder: Path, *, seed: int = 0) -> None:
    """Write a model that captions in a chat, with a processor that reads no videos."""
    _write_idefics(folder, "Idefics3", seed)


def write_smolvlm(folder: Path, *, seed: int = 0) -> None:
    """Write a model with a processor that needs the package num2words."""
    _write_idefics(folder, "SmolVLM", seed)


def _write_idefics(folder: Path, kind: str, seed: int) -> None:
    import transformers

    ids = _write_tokenizer(folder, _IDEFICS3_MARKS, _template(_IMAGE))
    config: Any = getattr(transformers, f"{kind}Config")(
        text_config={
            "model_type": "llama",
            **_text_sizes(ids),
            "intermediate_size": 64,
            "num_key_value_heads": 1,
        },
        vision_config=_VISION,
        image_token_id=ids[_IMAGE],
        pad_token_id=ids[_PAD],
        scale_factor=2,
    )
    _write_model(folder, getattr(transformers, f"{kind}ForConditionalGeneration"), config, ids, seed)
    image_processor = {
        "image_processor_type": f"{kind}ImageProcessor",
        "do_image_splitting": False,
        "size": {"longest_edge": 28},
        "max_image_size": {"longest_edge": 28},
    }
    _write_processor(folder, f"{kind}Processor", image_processor, image_seq_len=1)


def write_blip(folder: Path, *, seed: int = 0) -> None:
    """Write a model that continues a text, of a class without scaled dot product attention."""
    from transformers import BlipConfig, BlipForConditionalGeneration

    ids = _write_tokenizer(folder, _MARKS, None, around=(_START, _END))
    text = {
        **_text_sizes(ids),
        "intermediate_size": 64,
        "encoder_hidden_size": 16,
        "sep_token_id": ids[_END],
    }
    # The default range is so small that the model would not see the image.
    vision = {**_VISION, "initializer_range": 0.02}
    config: Any = BlipConfig(vision_config=vision, text_config=text, projection_dim=16)
    _write_model(folder, BlipForConditionalGeneration, config, ids, seed)
    image_processor = {"image_processor_type": "BlipImageProcessor", "size": {"height": 28, "width": 28}}
    _write_processor(folder, "BlipProcessor", image_processor)


def write_blip2(folder: Path, *, seed: int = 0) -> None:
    """Write a model that continues a text, without a chat template."""
    from transformers import Blip2Config, Blip2ForConditionalGeneration

    ids = _write_tokenizer(folder, _MARKS, None)
    config: Any = Blip2Config(
        vision_config=_VISION,
        qformer_config={
            "vocab_size": len(ids),
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "encoder_hidden_size": 16,
        },
        text_config={"model_type": "opt", **_text_sizes(ids), "ffn_dim": 64, "word_embed_proj_dim": 32},
        num_query_tokens=4,
        image_token_index=ids[_IMAGE],
    )
    _write_model(folder, Blip2ForConditionalGeneration, config, ids, seed)
    image_processor = {"image_processor_type": "BlipImageProcessor", "size": {"height": 28, "width": 28}}
    _write_processor(folder, "Blip2Processor", image_processor, num_query_tokens=4)


def write_florence2(folder: Path, *, seed: int = 0) -> None:
    """Write a model of which an encoder reads the prompt, and a decoder writes the caption."""
    from transformers import Florence2Config, Florence2ForConditionalGeneration

    ids = _write_tokenizer(
        folder, _MARKS, None, bos_token=_START, extra_special_tokens={"image_token": _IMAGE}
    )
    config: Any = Florence2Config(
        vision_config={
            "depths": (1, 1, 1, 1),
            "embed_dim": (8, 8, 16, 16),
            "num_heads": (1, 1, 2, 2),
            "num_groups": (1, 1, 2, 2),
            "window_size": 4,
            "projection_dim": 32,
        },
        text_config={
            "model_type": "bart",
            "vocab_size": len(ids),
            "d_model": 32,
            **{f"{part}_layers": 1 for part in ("encoder", "decoder")},
            **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
            **{f"{part}_ffn_dim": 64 for part in ("encoder", "decoder")},
            "max_position_embeddings": 512,
            "bos_token_id": ids[_START],
            "eos_token_id": ids[_END],
            "pad_token_id": ids[_PAD],
            "decoder_start_token_id": ids[_END],
            "forced_eos_token_id": None,
        },
        image_token_id=ids[_IMAGE],
    )
    _write_model(folder, Florence2ForConditionalGeneration, config, ids, seed)
    # One token for each square of 32 pixels, and one for their mean.
    edges = {"height": 64, "width": 64}
    image_processor = {
        "image_processor_type": "CLIPImageProcessor",
        "size": edges,
        "crop_size": edges,
        "image_seq_length": 5,
    }
    _write_processor(folder, "Florence2Processor", image_processor)


def write_qwen2_5_vl(folder: Path, *, seed: int = 0) -> None:
    """Write a model that gets one token for each four patches of an image."""
    _write_qwen(folder, qwen2_5_vl, "Qwen2_5_VLProcessor", patch_size=14, seed=seed)


def write_qwen3_vl(folder: Path, *, seed: int = 0) -> None:
    """Write a model that adds features of the image to layers of its language model."""
    make = partial(qwen3_vl, "Qwen3VLForConditionalGeneration")
    _write_qwen(folder, make, "Qwen3VLProcessor", patch_size=16, seed=seed)


def _write_qwen(folder: Path, make: Callable[[], Any], kind: str, *, patch_size: int, seed: int) -> None:
    import torch

    template = _template("<|vision_start|><|image_pad|><|vision_end|>")
    write_qwen_tokenizer(folder, template=template)
    write_text(folder / "chat_template.jinja", template)
    torch.manual_seed(seed)
    model = make()
    _sharpen(model)
    model.generation_config.eos_token_id = vocabulary()[0][_END]
    model.save_pretrained(folder)
    reading = {
        "processor_class": kind,
        "patch_size": patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": (2 * patch_size) ** 2,
        "max_pixels": (4 * patch_size) ** 2,
    }
    images = {**reading, "image_processor_type": "Qwen2VLImageProcessor"}
    write_json(folder / "preprocessor_config.json", images)


def _write_tokenizer(
    folder: Path,
    marks: Sequence[str],
    template: str | None,
    *,
    around: tuple[str, str] | None = None,
    **settings: Any,
) -> dict[str, int]:
    """Write a tokenizer, and return its ids; `around` are the tokens at the start and the end of a text."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_level(marks)
    if around is not None:
        special = [(token, vocabulary(marks)[0][token]) for token in around]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{around[0]} $A {around[1]}", special_tokens=special
        )
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    if template is not None:
        write_text(folder / "chat_template.jinja", template)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _END,
        "pad_token": _PAD,
        "model_max_length": 4096,
        **settings,
    }
    write_json(folder / "tokenizer_config.json", config)
    return vocabulary(marks)[0]


def _text_sizes(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "vocab_size": len(ids),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": ids[_PAD],
        "eos_token_id": ids[_END],
        "pad_token_id": ids[_PAD],
    }


def _write_model(folder: Path, kind: Any, config: Any, ids: dict[str, int], seed: int) -> None:
    import torch

    torch.manual_seed(seed)
    model = kind(config)
    _sharpen(model)
    model.generation_config.eos_token_id = ids[_END]
    model.generation_config.pad_token_id = ids[_PAD]
    model.save_pretrained(folder)


def _sharpen(model: Any) -> None:
    # Initial weights are so small that every image gets the same text.
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(8)


def _write_processor(folder: Path, kind: str, image_processor: dict[str, Any], **settings: Any) -> None:
    write_json(folder / "preprocessor_config.json", {**image_processor, "processor_class": kind})
    write_json(folder / "processor_config.json", {**settings, "processor_class": kind})
