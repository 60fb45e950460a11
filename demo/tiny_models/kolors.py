"""A tiny Kolors with random weights."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

from demo.tiny_models.parts import WORDS, assemble, vae, write_json
from demo.tiny_models.sized_unet import sized_unet
from pipeline.storage.atomic import write_bytes

_TEXT_WIDTH = 32
_UNET_TEXT_WIDTH = 48
_NUM_MARKS = 64
"""Number of token ids reserved for the tokenizer's marks, behind its pieces."""


def make_tiny_kolors(folder: Path, *, seed: int = 0) -> None:
    """Write the model as a diffusers folder; equal arguments give equal bytes.

    `KolorsPipeline.from_pretrained(folder)` loads it, and it draws pictures of 64x64 pixels.

    Args:
        folder: Destination, created with its parents; existing files are replaced.
        seed: Seed of the random weights.
    """
    from diffusers import EulerDiscreteScheduler

    scheduler = partial(
        EulerDiscreteScheduler,
        beta_start=0.00085,
        beta_end=0.014,
        beta_schedule="scaled_linear",
        num_train_timesteps=1100,
        steps_offset=1,
        timestep_spacing="leading",
    )
    assemble(
        folder,
        "KolorsPipeline",
        {
            "vae": partial(vae, scaling_factor=0.13025),
            "unet": partial(
                sized_unet,
                text_width=_UNET_TEXT_WIDTH,
                pooled_width=_TEXT_WIDTH,
                encoder_hid_dim=_TEXT_WIDTH,
                encoder_hid_dim_type="text_proj",
            ),
            "text_encoder": _chatglm,
            "scheduler": scheduler,
        },
        tokenizers={"tokenizer": _write_tokenizer},
        seed=seed,
        index={
            "feature_extractor": [None, None],
            "force_zeros_for_empty_prompt": False,
            "image_encoder": [None, None],
            "text_encoder": ["kolors", "ChatGLMModel"],
            "tokenizer": ["kolors", "ChatGLMTokenizer"],
        },
    )


def _sentencepiece_model() -> bytes:
    """Train a SentencePiece model whose pieces are `WORDS` and the printable ASCII characters."""
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["".join(chr(code) for code in range(33, 127))]),
        model_writer=model,
        model_type="char",
        use_all_vocab=True,
        user_defined_symbols=["▁" + word for word in WORDS.split()],
        minloglevel=2,
    )
    return model.getvalue()


def _write_tokenizer(folder: Path) -> str:
    """Write a `ChatGLMTokenizer` that spells unknown words, and return its class name."""
    write_bytes(folder / "tokenizer.model", _sentencepiece_model())
    config = {"model_max_length": 4096, "padding_side": "left", "tokenizer_class": "ChatGLMTokenizer"}
    write_json(folder / "tokenizer_config.json", config)
    return "ChatGLMTokenizer"


def _chatglm() -> Any:
    import torch
    from diffusers.pipelines.kolors import ChatGLMModel
    from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig
    from sentencepiece import SentencePieceProcessor

    words: Any = SentencePieceProcessor(model_proto=_sentencepiece_model())
    config: Any = ChatGLMConfig(
        num_layers=2,
        padded_vocab_size=words.vocab_size() + _NUM_MARKS,
        hidden_size=_TEXT_WIDTH,
        ffn_hidden_size=64,
        kv_channels=8,
        num_attention_heads=4,
        seq_length=512,
        multi_query_attention=True,
        multi_query_group_num=2,
        add_bias_linear=False,
        add_qkv_bias=True,
        original_rope=True,
    )
    made: Any = ChatGLMModel(config)
    with torch.no_grad():  # left empty until weights are loaded
        for name, weight in made.named_parameters():
            if "norm" in name:
                weight.fill_(1.0)
            else:
                weight.normal_(std=0.1)
    return made
