"""A small Mistral 3 with its vision encoder, and the files of its processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from demo.tiny_models.language import byte_level, vocabulary
from demo.tiny_models.parts import write_json
from pipeline.storage.atomic import write_text

_MARKS = ("<unk>", "<s>", "</s>", "<pad>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]")
_IMAGE_MARKS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set mark = 'SYSTEM_PROMPT' if message.role == 'system' else 'INST' %}"
    "[{{ mark }}]{% for part in message.content %}"
    "{{ '[IMG]' if part.type == 'image' else part.text }}{% endfor %}[/{{ mark }}]{% endfor %}"
)
"""Chat template in the style of Mistral's, in which a message consists of parts."""

_TEXT_TEMPLATE = "{% for message in messages %}[INST]{{ message.content }}[/INST]{% endfor %}"
"""Chat template of a model that reads text only, in which a message is a string."""

_PATCH_PX = 14


def write_mistral_tokenizer(folder: Path, *, max_length: int = 4096) -> str:
    """Write a tokenizer like Mistral's, with a start mark and padding on the left; return its class name."""
    from tokenizers import processors

    tokenizer = byte_level((*_MARKS, *_IMAGE_MARKS))
    bos = "<s>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    config = {
        "bos_token": bos,
        "eos_token": "</s>",
        "model_max_length": max_length,
        "pad_token": "<pad>",
        "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
    }
    write_json(folder / "tokenizer_config.json", config)
    return "PreTrainedTokenizerFast"


def write_rewriter_tokenizer(folder: Path) -> str:
    """Write the tokenizer of a model that rewrites prompts in at most 8 tokens; return its class name."""
    write_text(folder / "chat_template.jinja", _TEXT_TEMPLATE)
    # Pipelines let the model write as many tokens as the tokenizer's maximum.
    return write_mistral_tokenizer(folder, max_length=8)


def write_pixtral_processor(folder: Path) -> str:
    """Write a `PixtralProcessor` with tokenizer, chat template and image processor; return its class name."""
    write_mistral_tokenizer(folder)
    write_text(folder / "chat_template.jinja", _TEMPLATE)
    marks = dict(zip(("image_token", "image_break_token", "image_end_token"), _IMAGE_MARKS, strict=True))
    own = {"patch_size": _PATCH_PX, "processor_class": "PixtralProcessor", "spatial_merge_size": 2}
    write_json(folder / "processor_config.json", {**own, **marks})
    reading = {
        "image_processor_type": "PixtralImageProcessor",
        "patch_size": {"height": _PATCH_PX, "width": _PATCH_PX},
        "processor_class": "PixtralProcessor",
        "size": {"longest_edge": 1540},
    }
    write_json(folder / "preprocessor_config.json", reading)
    return "PixtralProcessor"


def ministral3(*, width: int = 16, layers: int = 1) -> Any:
    """Return a `Ministral3ForCausalLM` for `write_mistral_tokenizer`'s tokens."""
    from transformers import Ministral3Config, Ministral3ForCausalLM

    return Ministral3ForCausalLM(Ministral3Config(**_sizes(width, layers)))


def _sizes(width: int, layers: int) -> dict[str, Any]:
    ids = vocabulary((*_MARKS, *_IMAGE_MARKS))[0]
    return {
        "vocab_size": len(ids),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": width // 2,
        "max_position_embeddings": 4096,
        "bos_token_id": ids["<s>"],
        "eos_token_id": ids["</s>"],
        "pad_token_id": ids["<pad>"],
        "sliding_window": None,
    }


def mistral3(kind: str = "Mistral3ForConditionalGeneration", *, width: int = 32, layers: int = 3) -> Any:
    """Return a Mistral 3 for `write_mistral_tokenizer`'s tokens."""
    import transformers

    ids = vocabulary((*_MARKS, *_IMAGE_MARKS))[0]
    text = {"model_type": "mistral", **_sizes(width, layers)}
    vision: dict[str, Any] = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_size": _PATCH_PX,
        "image_size": 4 * _PATCH_PX,
    }
    config: Any = transformers.Mistral3Config(
        text_config=text, vision_config=vision, image_token_index=ids["[IMG]"]
    )
    return getattr(transformers, kind)(config)
