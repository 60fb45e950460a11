"""A Stable Diffusion of about a million random weights, made offline: for the demo and the tests.

Every class is the one of the real model; only the sizes are small. Its pictures mean nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.atomic import write_text
from pipeline.families.base import BetaPrediction

MAX_LENGTH = 77
TEXT_WIDTH = 32
START, END = "<|startoftext|>", "<|endoftext|>"
_WORDS = (
    "a the of on in at and with an is to over under by for near photo photograph picture closeup portrait "
    "landscape white red green blue yellow small large old cat coffee cup astronaut rocket camera moon "
    "surface brick wall gravel coins page text clock eye cell field sky water flower woman man"
)
"""Become one token each; any other word is spelled with bytes."""

_MEAN_GAIN = 32.0
_LOGVAR_BIAS = -8.0
"""Of the VAE's last layer: an untrained one answers with a mean near 0 and a deviation near 1, which would
make every latent the same noise."""


def make_tiny(folder: Path, *, prediction_type: BetaPrediction = "epsilon", seed: int = 0) -> None:
    """Write the model as a diffusers folder; the same bytes for the same arguments.

    It is read by `StableDiffusionPipeline.from_pretrained(folder)` and draws pictures of 64x64 pixels. The
    caller's random state is left as it was.

    Args:
        folder: Made with its parents; files that are there already are replaced.
        prediction_type: What the scheduler's configuration says.
        seed: Of the random weights.
    """
    import torch
    from diffusers import DDPMScheduler

    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        for role, make in (("vae", write_vae), ("unet", _unet), ("text_encoder", write_text_encoder)):
            torch.manual_seed(seed)
            make(folder / role)
    scheduler = DDPMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        steps_offset=1,
        prediction_type=prediction_type,
    )
    scheduler.save_pretrained(folder / "scheduler")
    write_tokenizer(folder / "tokenizer")
    write_json(folder / "model_index.json", _index())


def write_vae(folder: Path, *, scaling_factor: float = 0.18215) -> None:
    """An `AutoencoderKL` of 4 channels and factor 8, from torch's random state."""
    import torch
    from diffusers import AutoencoderKL

    sizes: dict[str, Any] = {
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": (16, 16, 32, 32),
        "layers_per_block": 1,
        "latent_channels": 4,
        "norm_num_groups": 8,
        "sample_size": 64,
        "scaling_factor": scaling_factor,
    }
    vae = AutoencoderKL(**sizes)
    with torch.no_grad():
        assert vae.quant_conv is not None
        vae.quant_conv.weight[:4] *= _MEAN_GAIN
        bias = vae.quant_conv.bias
        assert bias is not None
        bias[4:] = _LOGVAR_BIAS
    vae.save_pretrained(folder)


def _unet(folder: Path) -> None:
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=8,
        norm_num_groups=8,
        cross_attention_dim=TEXT_WIDTH,
    )
    unet.save_pretrained(folder)


def write_text_encoder(folder: Path) -> None:
    """A `CLIPTextModel` of width `TEXT_WIDTH`, from torch's random state."""
    from transformers import CLIPTextConfig, CLIPTextModel

    ids = vocabulary()[0]
    config = CLIPTextConfig(
        vocab_size=len(ids),
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_LENGTH,
        projection_dim=TEXT_WIDTH,
        bos_token_id=ids[START],
        eos_token_id=ids[END],
        pad_token_id=ids[END],
    )
    CLIPTextModel(config).save_pretrained(folder)


def vocabulary() -> tuple[dict[str, int], list[str]]:
    """(token to id, merges in order) of a byte-level BPE, as CLIP's: `</w>` ends each word.

    Merges of long words come first, or the ends of short ones would break them up.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = sorted(ByteLevel.alphabet())
    tokens += [token + "</w>" for token in tokens]
    merges: list[str] = []
    for word in sorted(_WORDS.split(), key=lambda word: (-len(word), word)):
        left, *letters = [*word[:-1], word[-1] + "</w>"]
        for letter in letters:
            if left + letter not in tokens:
                merges.append(f"{left} {letter}")
                tokens.append(left + letter)
            left += letter
    return {token: number for number, token in enumerate([*tokens, START, END])}, merges


def write_tokenizer(folder: Path) -> None:
    """A `CLIPTokenizer` that takes `MAX_LENGTH` tokens."""
    ids, merges = vocabulary()
    write_json(folder / "vocab.json", ids)
    write_text(folder / "merges.txt", "\n".join(["#version: 0.2", *merges]) + "\n")
    marks = {"bos_token": START, "eos_token": END, "pad_token": END, "unk_token": END}
    write_json(folder / "special_tokens_map.json", marks)
    config = {**marks, "model_max_length": MAX_LENGTH, "tokenizer_class": "CLIPTokenizer"}
    write_json(folder / "tokenizer_config.json", config)


def _index() -> dict[str, object]:
    import diffusers

    return {
        "_class_name": "StableDiffusionPipeline",
        "_diffusers_version": diffusers.__version__,
        "feature_extractor": [None, None],
        "image_encoder": [None, None],
        "requires_safety_checker": False,
        "safety_checker": [None, None],
        "scheduler": ["diffusers", "DDPMScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }


def write_json(path: Path, value: object) -> None:
    """`value` as indented JSON in `path`."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
