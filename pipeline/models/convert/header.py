"""Header of a safetensors file: names, dtypes and shapes of its tensors, without their values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from pipeline.errors import ModelError
from pipeline.models.diffusers_folder import MAX_JSON_BYTES, index_file, require_whole

# Torch files are zip archives around a pickle; older ones and plain pickles begin with the protocol's number.
_PICKLE_SUFFIXES = frozenset([".ckpt", ".pt", ".pth", ".bin", ".pkl"])
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


@dataclass(frozen=True)
class Tensor:
    """Dtype, as safetensors names it ("F16", "BF16", "F32", "F8_E4M3", ...), and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """Tensors of a file by name, and its metadata."""

    file: Path
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Sorted names of all tensors."""
        return tuple(sorted(self.tensors))

    def with_prefix(self, prefix: str, without: tuple[str, ...] = ()) -> dict[str, Tensor]:
        """Return the tensors whose names start with `prefix` and with none of `without`, by full name."""
        return {
            name: tensor
            for name, tensor in self.tensors.items()
            if name.startswith(prefix) and not name.startswith(without)
        }

    def has_any(self, parts: Iterable[str]) -> bool:
        """Return True if one of `parts` occurs in the name of a tensor."""
        return any(part in name for part in tuple(parts) for name in self.names)


def read_header(file: Path) -> Header:
    """Return the header of a complete safetensors file.

    Raises:
        ModelError: The file is missing, truncated, a folder, a pickle, a GGUF file or of an unknown format.
    """
    _require_file(file)
    with file.open("rb") as opened:
        start = opened.read(8)
        _require_safetensors(file, start)
        length = int.from_bytes(start, "little")

        # A length beyond the file or the limit is damage, or another format.
        text = opened.read(length) if length < min(file.stat().st_size, MAX_JSON_BYTES) else b""

    try:
        entries = cast("dict[str, Any]", json.loads(text))
        metadata = {str(key): str(value) for key, value in entries.pop("__metadata__", {}).items()}
        tensors = {name: Tensor(entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as err:
        raise ModelError(
            "the file is truncated, or not a safetensors file",
            where=str(file),
            fix="download it again, and compare its size with the size shown on the site",
        ) from err
    require_whole(file)
    return Header(file, tensors, metadata)


def _require_file(file: Path) -> None:
    if index_file(file).is_file():
        what, fix = "this is already a diffusers folder", f"use it directly: model.base: {file}"
        raise ModelError(what, where=str(file), fix=fix)
    if not file.is_file():
        what = "expected a single file, got a folder" if file.is_dir() else "the file does not exist"
        fix = "pass the path of a model in one .safetensors file"
        raise ModelError(what, where=str(file.absolute()), fix=fix)


def _require_safetensors(file: Path, start: bytes) -> None:
    if start.startswith(b"GGUF"):
        raise ModelError(
            "GGUF files cannot be converted: their weights are quantized for inference",
            where=str(file),
            fix="use the same model as .safetensors in float16 or bfloat16",
        )
    if file.suffix.lower() in _PICKLE_SUFFIXES or start.startswith(_PICKLE_STARTS):
        raise ModelError(
            "pickle files are never opened, because a pickle can run any code",
            where=str(file),
            fix="use the same model as .safetensors: most sites offer both, and its author can save it with "
            "safetensors.torch.save_file",
        )
