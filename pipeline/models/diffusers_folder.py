"""Reading a diffusers folder without torch: configurations, and which weight file a load would take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from pipeline.errors import ModelError
from pipeline.models.hub import WEIGHT_VARIANTS

_STEMS = ("diffusion_pytorch_model", "model", "pytorch_model")
"""Names under which diffusers and transformers keep a component's weights."""

_LENGTH_BYTES = 8
"""At the start of a safetensors file: the length of its header, little endian."""

_TOKENIZER_CONFIGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
)
_TOKENIZER_CONTENTS = ("tokenizer.json", "vocab.json", "merges.txt", "spiece.model", "tokenizer.model")
_CHAT_TEMPLATE = "chat_template.jinja"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        ModelError: The file is missing, unreadable, or holds no JSON object.
    """
    fix = "set model.base to a complete diffusers folder, or a Hub id; download the model again if it was cut"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as err:
        raise ModelError(f"the base model has no {path.name}", where=str(path), fix=fix) from err
    except (OSError, ValueError) as err:
        raise ModelError(f"a file of the base model is unreadable: {err}", where=str(path), fix=fix) from err
    if not isinstance(value, dict):
        raise ModelError("a file of the base model holds no JSON object", where=str(path), fix=fix)
    return cast("dict[str, Any]", value)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The weight files that a load of the component in `folder` reads, sorted; with their index if sharded.

    As diffusers and transformers do, `*.safetensors` is preferred to `*.bin`. Files of `weight_variant` are
    taken only where there are no others.

    Raises:
        ModelError: There are none, or a shard of the index is missing.
    """
    return _weights(folder)[1]


def weight_variant(folder: Path) -> str | None:
    """What the names of `weight_files` have before their ending, for `from_pretrained`; None: nothing.

    Raises:
        ModelError: As `weight_files`.
    """
    return _weights(folder)[0]


def _weights(folder: Path) -> tuple[str | None, tuple[Path, ...]]:
    for variant in (None, *WEIGHT_VARIANTS):
        for suffix in ("safetensors", "bin"):
            for stem in _STEMS:
                single = folder / _of_variant(f"{stem}.{suffix}", variant)
                if single.is_file():
                    return variant, (single,)
                index = folder / _of_variant(f"{stem}.{suffix}.index.json", variant)
                if index.is_file():
                    return variant, (index, *_shards(index))
    raise ModelError(
        "a component of the base model has no weights",
        where=str(folder),
        fix=f"it needs one of {', '.join(stem + '.safetensors' for stem in _STEMS)} (or .bin, or shards with "
        f"their index), or of {', '.join(_of_variant('*.safetensors', each) for each in WEIGHT_VARIANTS)}; "
        "files with another variant in their name must be renamed",
    )


def _of_variant(name: str, variant: str | None) -> str:
    """The name with the variant before its last ending, where diffusers and transformers look for it."""
    start, end = name.rsplit(".", 1)
    return name if variant is None else f"{start}.{variant}.{end}"


def require_whole(path: Path) -> None:
    """Nothing, where a safetensors file has the bytes that its header speaks of; its tensors are not read.

    Raises:
        ModelError: It is cut short, or has no header.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = file.read(length) if length < size else b""
    try:
        tensors = cast("dict[str, Any]", json.loads(header))
        ends = [said["data_offsets"][1] for name, said in tensors.items() if name != "__metadata__"]
        wanted = _LENGTH_BYTES + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        wanted = None
    if wanted != size:
        has = f"{size:,} bytes" if wanted is None else f"{size:,} of {wanted:,} bytes"
        what = f"a weight file of the base model is cut short or damaged: it has {has}"
        raise ModelError(what, where=str(path), fix="download the model again")


def tokenizer_files(folder: Path) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """(configurations, vocabularies) of the tokenizer in `folder`, those that exist.

    Raises:
        ModelError: There is no vocabulary.
    """
    configs = tuple(folder / name for name in _TOKENIZER_CONFIGS if (folder / name).is_file())
    contents = tuple(folder / name for name in _TOKENIZER_CONTENTS if (folder / name).is_file())
    template = folder / _CHAT_TEMPLATE
    if not contents:
        raise ModelError(
            "the base model's tokenizer has no vocabulary",
            where=str(folder),
            fix=f"it needs at least one of {', '.join(_TOKENIZER_CONTENTS)}",
        )
    return configs, (*contents, template) if template.is_file() else contents


def _shards(index: Path) -> tuple[Path, ...]:
    names = sorted(set(cast("dict[str, str]", read_json(index).get("weight_map", {})).values()))
    shards = tuple(index.parent / name for name in names)
    missing = [str(shard) for shard in shards if not shard.is_file()]
    if missing or not shards:
        raise ModelError(
            f"the weight index names files that do not exist: {', '.join(missing) or 'it is empty'}",
            where=str(index),
            fix="download the model again",
        )
    return shards
