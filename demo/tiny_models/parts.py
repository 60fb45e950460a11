"""Parts of tiny models: a VAE, text encoders, tokenizers, and the diffusers folder that holds them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pipeline.storage.atomic import write_text

MAX_LENGTH = 77
"""Number of tokens that a tiny CLIP takes, as many as a real one."""

TEXT_WIDTH = 32
START, END = "<|startoftext|>", "<|endoftext|>"
WORDS = (
    "a the of on in at and with an is to over under by for near photo photograph picture closeup portrait "
    "landscape white red green blue yellow small large old cat coffee cup astronaut rocket camera moon "
    "surface brick wall gravel coins page text clock eye cell field sky water flower woman man"
)
"""Words that become one token each; any other word is spelled."""

_MEAN_GAIN = 32.0
_LOGVAR_BIAS = -8.0
"""Changes of the VAE's last layer: an untrained VAE returns a mean near 0 and a deviation near 1, so that
every latent would be the same noise."""

Makers = Mapping[str, Callable[[], Any]]
"""Functions that create each network or scheduler from torch's random state, by component."""

Tokenizers = Mapping[str, Callable[[Path], str]]
"""Functions that write each tokenizer into a folder and return its class name, by component."""


def assemble(
    folder: Path,
    pipeline_class: str,
    makers: Makers,
    *,
    tokenizers: Tokenizers,
    seed: int,
    index: Mapping[str, object] | None = None,
) -> None:
    """Write a diffusers folder; equal arguments give equal bytes, and the random state does not change.

    Args:
        folder: Destination, created with its parents; existing files are replaced.
        pipeline_class: Name of the pipeline class in diffusers.
        makers: Networks and scheduler, each created from `seed` and saved.
        tokenizers: Tokenizers to write.
        seed: Seed of the random weights.
        index: Additional entries of `model_index.json`, which replace those of the components.
    """
    entries = _write_components(folder, makers, tokenizers, seed)
    _write_index(folder / "model_index.json", pipeline_class, entries | dict(index or {}))


def assemble_modular(
    folder: Path,
    pipeline_class: str,
    makers: Makers,
    *,
    tokenizers: Tokenizers,
    seed: int,
    blocks: str,
) -> None:
    """Write the folder of a modular pipeline; see `assemble`.

    `blocks` is the name of its class of blocks in diffusers.
    """
    entries: dict[str, object] = {"_blocks_class_name": blocks}
    for role, (library, name) in _write_components(folder, makers, tokenizers, seed).items():
        # diffusers replaces the repository by the folder in which it finds the index.
        source = {"pretrained_model_name_or_path": "tiny/model", "subfolder": role}
        hint = {**source, "variant": None, "revision": None, "type_hint": [library, name]}
        entries[role] = [None, None, hint]
    _write_index(folder / "modular_model_index.json", pipeline_class, entries)


def _write_components(
    folder: Path, makers: Makers, tokenizers: Tokenizers, seed: int
) -> dict[str, list[str]]:
    """Write all components, and return [library, class] of each."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    entries: dict[str, list[str]] = {}
    with torch.random.fork_rng(devices=[]):
        for role, make in makers.items():
            torch.manual_seed(seed)
            made = make()
            made.save_pretrained(folder / role)
            entries[role] = [type(made).__module__.split(".")[0], type(made).__name__]
    for role, write in tokenizers.items():
        entries[role] = ["transformers", write(folder / role)]
    return entries


def _write_index(file: Path, pipeline_class: str, entries: Mapping[str, object]) -> None:
    import diffusers

    names = {"_class_name": pipeline_class, "_diffusers_version": diffusers.__version__}
    write_json(file, {**names, **dict(sorted(entries.items()))})


def vae(
    *,
    channels: int = 4,
    scaling_factor: float = 0.18215,
    shift_factor: float | None = None,
    quant: bool = True,
) -> Any:
    """Return an `AutoencoderKL` of factor 8; `quant` adds convolutions around its latent."""
    import torch
    from diffusers import AutoencoderKL

    sizes: dict[str, Any] = {
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": (16, 16, 32, 32),
        "layers_per_block": 1,
        "latent_channels": channels,
        "norm_num_groups": 8,
        "sample_size": 64,
        "scaling_factor": scaling_factor,
        "shift_factor": shift_factor,
        "use_quant_conv": quant,
        "use_post_quant_conv": quant,
    }
    made: Any = AutoencoderKL(**sizes)
    last = made.quant_conv if quant else made.encoder.conv_out
    with torch.no_grad():
        last.weight[:channels] *= _MEAN_GAIN
        last.bias[channels:] = _LOGVAR_BIAS
    return made


def clip(
    kind: Literal["CLIPTextModel", "CLIPTextModelWithProjection"] = "CLIPTextModel",
    *,
    width: int = TEXT_WIDTH,
    layers: int = 2,
    projection: int | None = None,
    max_length: int = MAX_LENGTH,
    **config: Any,
) -> Any:
    """Return a CLIP text encoder for `write_clip_tokenizer`'s tokens."""
    import transformers

    ids = clip_vocabulary()[0]
    made = transformers.CLIPTextConfig(
        vocab_size=len(ids),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=max_length,
        projection_dim=projection or width,
        bos_token_id=ids[START],
        eos_token_id=ids[END],
        pad_token_id=ids[END],
        **config,
    )
    return getattr(transformers, kind)(made)


def t5(*, width: int = TEXT_WIDTH) -> Any:
    """Return a `T5EncoderModel` for `write_t5_tokenizer`'s tokens."""
    from transformers import T5Config, T5EncoderModel

    sizes: dict[str, Any] = {
        "vocab_size": num_t5_tokens(),
        "d_model": width,
        "d_kv": 8,
        "d_ff": 2 * width,
        "num_layers": 2,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    }
    return T5EncoderModel(T5Config(**sizes))


def flow_schedule(**config: Any) -> Any:
    """Return a `FlowMatchEulerDiscreteScheduler`."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**config)


def flow_solver(name: Literal["DPMSolverMultistepScheduler", "UniPCMultistepScheduler"]) -> Any:
    """Return this multistep solver with the settings of flow matching."""
    import diffusers

    return getattr(diffusers, name)(flow_shift=3.0, prediction_type="flow_prediction", use_flow_sigmas=True)


def clip_vocabulary(words: str = WORDS) -> tuple[dict[str, int], list[str]]:
    """Return (token to id, ordered merges) of a byte-level BPE like CLIP's, in which `</w>` ends each word.

    Each of `words` becomes one token. Merges of long words come first; otherwise the ends of short words
    would split them.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = sorted(ByteLevel.alphabet())
    tokens += [token + "</w>" for token in tokens]
    merges: list[str] = []
    for word in sorted(words.split(), key=lambda word: (-len(word), word)):
        left, *letters = [*word[:-1], word[-1] + "</w>"]
        for letter in letters:
            if left + letter not in tokens:
                merges.append(f"{left} {letter}")
                tokens.append(left + letter)
            left += letter
    return {token: number for number, token in enumerate([*tokens, START, END])}, merges


def write_clip_tokenizer(folder: Path, words: str = WORDS, *, max_length: int = MAX_LENGTH) -> str:
    """Write a `CLIPTokenizer` that spells words other than `words`; return its class name."""
    ids, merges = clip_vocabulary(words)
    write_json(folder / "vocab.json", ids)
    write_text(folder / "merges.txt", "\n".join(["#version: 0.2", *merges]) + "\n")
    marks = {"bos_token": START, "eos_token": END, "pad_token": END, "unk_token": END}
    write_json(folder / "special_tokens_map.json", marks)
    config = {**marks, "model_max_length": max_length, "tokenizer_class": "CLIPTokenizer"}
    write_json(folder / "tokenizer_config.json", config)
    return "CLIPTokenizer"


def write_t5_tokenizer(folder: Path) -> str:
    """Write a `T5TokenizerFast` of `WORDS` and the printable ASCII characters; return its class name."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    tokenizer: Any = Tokenizer(models.Unigram(_t5_pieces(), unk_id=2, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    config = {
        "eos_token": "</s>",
        "extra_ids": 0,
        "model_max_length": 512,
        "pad_token": "<pad>",
        "tokenizer_class": "T5Tokenizer",
        "unk_token": "<unk>",
    }
    write_json(folder / "tokenizer_config.json", config)
    return "T5TokenizerFast"


def num_t5_tokens() -> int:
    """Return the number of tokens of `write_t5_tokenizer`."""
    return len(_t5_pieces())


def _t5_pieces() -> list[tuple[str, float]]:
    words = [("▁" + word, -2.0) for word in WORDS.split()]
    letters = [(chr(code), -5.0) for code in range(33, 127)]
    return [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -3.0), *words, *letters]


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
