"""A small Llama and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from demo.tiny_models.language import byte_level, vocabulary
from demo.tiny_models.parts import write_json
from pipeline.storage.atomic import write_text

_START, _END = "<|begin_of_text|>", "<|eot_id|>"


def write_llama3_tokenizer(folder: Path) -> str:
    """Write a `PreTrainedTokenizerFast` that adds a start mark but no end mark, as Llama 3's does."""
    from tokenizers import processors

    tokenizer = byte_level((_START, _END))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_START} $A",
        pair=f"{_START} $A {_START} $B",
        special_tokens=[(_START, tokenizer.token_to_id(_START))],
    )
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    config = {
        "bos_token": _START,
        "eos_token": _END,
        "model_max_length": 4096,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(folder / "tokenizer_config.json", config)
    return "PreTrainedTokenizerFast"


def llama(*, width: int = 32, layers: int = 2) -> Any:
    """Return a `LlamaForCausalLM` for `write_llama3_tokenizer`'s tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ids = vocabulary((_START, _END))[0]
    sizes: dict[str, Any] = {
        "vocab_size": len(ids),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "bos_token_id": ids[_START],
        "eos_token_id": ids[_END],
    }
    return LlamaForCausalLM(LlamaConfig(**sizes))
