"""Small language models as text encoders, and their tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo.tiny_models.parts import WORDS, write_json
from pipeline.storage.atomic import write_text

_MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_VISION_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_MARKS = (*_MARKS, *_VISION_MARKS)
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Chat template in the style of Qwen3's; without thinking, the answer starts with an empty thought."""

PARTS_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content %}{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Chat template in the style of Qwen3-VL's, in which a message consists of parts."""


def vocabulary(
    marks: Sequence[str] = QWEN_MARKS,
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return (token to id, ordered merges) of a byte-level BPE whose words include the space before them."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = sorted(ByteLevel.alphabet())
    merges: list[tuple[str, str]] = []
    for word in sorted(WORDS.split(), key=lambda word: (-len(word), word)):
        left = "Ġ"
        for letter in word:
            if left + letter not in tokens:
                merges.append((left, letter))
                tokens.append(left + letter)
            left += letter
    return {token: number for number, token in enumerate([*tokens, *marks])}, merges


def byte_level(marks: Sequence[str]) -> Any:
    """Return a `tokenizers.Tokenizer` with the tokens of `vocabulary(marks)`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    ids, merges = vocabulary(marks)
    tokenizer: Any = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(marks))
    return tokenizer


def write_qwen_tokenizer(
    folder: Path, *, marks: Sequence[str] = QWEN_MARKS, template: str = _TEMPLATE
) -> str:
    """Write a `Qwen2TokenizerFast` with a chat template, and return its class name."""
    tokenizer = byte_level(marks)
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    config = {
        "chat_template": template,
        "eos_token": "<|im_end|>",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "Qwen2Tokenizer",
    }
    write_json(folder / "tokenizer_config.json", config)
    return "Qwen2TokenizerFast"


def _sizes(width: int, layers: int) -> dict[str, Any]:
    ids = vocabulary()[0]
    return {
        "vocab_size": len(ids),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }


def _spelled(marks: dict[str, str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return (token to id, ordered merges) of a BPE with byte fallback, in which "▁" starts a word."""
    letters = ["▁", *(chr(code) for code in range(33, 127)), "\n"]
    tokens = [*marks.values(), *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges: list[tuple[str, str]] = []
    for word in sorted(WORDS.split(), key=lambda word: (-len(word), word)):
        left = "▁"
        for letter in word:
            if left + letter not in tokens:
                merges.append((left, letter))
                tokens.append(left + letter)
            left += letter
    return {token: number for number, token in enumerate(tokens)}, merges


GEMMA_MARKS = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
LLAMA_MARKS = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}


def _write_spelled(folder: Path, kind: str, marks: dict[str, str]) -> None:
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    ids, merges = _spelled(marks)
    bos = marks["bos_token"]
    model = models.BPE(
        vocab=ids, merges=merges, unk_token=marks["unk_token"], byte_fallback=True, fuse_unk=True
    )
    tokenizer: Any = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(list(marks.values()))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, ids[bos])]
    )
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    config = {**marks, "add_bos_token": True, "add_eos_token": False, "model_max_length": 4096}
    write_json(folder / "tokenizer_config.json", {**config, "tokenizer_class": kind})


def write_gemma_tokenizer(folder: Path) -> str:
    """Write a `GemmaTokenizerFast` that spells unknown words, and return its class name."""
    _write_spelled(folder, "GemmaTokenizer", GEMMA_MARKS)
    return "GemmaTokenizerFast"


def write_llama_tokenizer(folder: Path) -> str:
    """Write a `LlamaTokenizerFast` that spells unknown words, and return its class name."""
    _write_spelled(folder, "LlamaTokenizer", LLAMA_MARKS)
    return "LlamaTokenizerFast"


def write_glm_tokenizer(folder: Path) -> str:
    """Write a `PreTrainedTokenizerFast` like GLM's that spells unknown words, and return its class name."""
    _write_spelled(folder, "PreTrainedTokenizerFast", LLAMA_MARKS)
    return "PreTrainedTokenizerFast"


def glm(*, width: int = 32) -> Any:
    """Return a `GlmModel` for `write_glm_tokenizer`'s tokens."""
    from transformers import GlmConfig, GlmModel

    ids = _spelled(LLAMA_MARKS)[0]
    marks = {f"{name}_id": ids[mark] for name, mark in LLAMA_MARKS.items() if name != "unk_token"}
    sizes: dict[str, Any] = {**_sizes(width, 3), "vocab_size": len(ids), "head_dim": width // 2, **marks}
    return GlmModel(GlmConfig(**sizes))


def gemma2(*, width: int = 32) -> Any:
    """Return a `Gemma2Model` for `write_gemma_tokenizer`'s tokens."""
    from transformers import Gemma2Config, Gemma2Model

    ids = _spelled(GEMMA_MARKS)[0]
    marks = {f"{name}_id": ids[mark] for name, mark in GEMMA_MARKS.items() if name != "unk_token"}
    sizes: dict[str, Any] = {**_sizes(width, 2), "vocab_size": len(ids), "head_dim": width // 2, **marks}
    return Gemma2Model(Gemma2Config(**sizes))


def umt5(*, width: int = 32, num_tokens: int | None = None) -> Any:
    """Return a `UMT5EncoderModel` for so many tokens, by default for `write_llama_tokenizer`'s."""
    from transformers import UMT5Config, UMT5EncoderModel

    sizes: dict[str, Any] = {
        "vocab_size": num_tokens or len(_spelled(LLAMA_MARKS)[0]),
        "d_model": width,
        "d_kv": 8,
        "d_ff": 2 * width,
        "num_layers": 2,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
    }
    return UMT5EncoderModel(UMT5Config(**sizes))


def qwen3(kind: str = "Qwen3Model", *, width: int = 32, layers: int = 3) -> Any:
    """Return a Qwen3 for `write_qwen_tokenizer`'s tokens."""
    import transformers

    config = transformers.Qwen3Config(**_sizes(width, layers), head_dim=width // 2)
    return getattr(transformers, kind)(config)


def qwen2_5_vl(*, width: int = 32, layers: int = 2) -> Any:
    """Return a `Qwen2_5_VLForConditionalGeneration` for `write_qwen_tokenizer`'s tokens."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    ids = vocabulary()[0]
    sections = [width // 8, width // 16, width // 16]
    text = {**_sizes(width, layers), "rope_parameters": {"rope_type": "default", "mrope_section": sections}}
    vision: dict[str, Any] = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": width,
        "fullatt_block_indexes": [0],
    }
    marks: dict[str, Any] = {
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
    }
    config: Any = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **marks)
    return Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl(
    kind: str = "Qwen3VLModel", *, width: int = 32, layers: int = 3, marks: Sequence[str] = QWEN_MARKS
) -> Any:
    """Return a Qwen3-VL for `write_qwen_tokenizer`'s tokens, with its vision encoder."""
    import transformers

    ids = vocabulary(marks)[0]
    sections = [width // 8, width // 16, width // 16]
    text = {
        "vocab_size": len(ids),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": width // 2,
        "max_position_embeddings": 4096,
        "pad_token_id": ids["<|endoftext|>"],
        "rope_parameters": {"rope_type": "default", "mrope_section": sections, "mrope_interleaved": True},
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": width,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    special: dict[str, Any] = {
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
    }
    config: Any = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **special)
    return getattr(transformers, kind)(config)
