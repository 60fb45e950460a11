"""What stands in front of a safetensors file: names, number formats and shapes of its tensors; no values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from pipeline.errors import ModelError
from pipeline.models.diffusers_folder import require_whole

_PICKLES = frozenset([".ckpt", ".pt", ".pth", ".bin", ".pkl"])
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""Of torch's files, which are zip archives around a pickle, and of a pickle itself."""


@dataclass(frozen=True)
class Tensor:
    """A tensor by its header.

    Attributes:
        dtype: As safetensors names it: "F16", "BF16", "F32", "F8_E4M3", ...
        shape: Of any rank.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_values(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """The tensors of a file by name, and its metadata."""

    file: Path
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of all tensors, sorted."""
        return tuple(sorted(self.tensors))

    def below(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix`."""
        return {name: tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}

    def has_any(self, parts: Iterable[str]) -> bool:
        """Whether one of the texts occurs in some tensor's name."""
        return any(part in name for part in tuple(parts) for name in self.names)


def read_header(file: Path) -> Header:
    """The header of a whole safetensors file.

    Raises:
        ModelError: There is no such file, it is a folder, a pickle, a GGUF file or something else, or it was
            cut short.
    """
    _require_file(file)
    with file.open("rb") as opened:
        start = opened.read(8)
        _require_no_other_format(file, start)
        length = int.from_bytes(start, "little")
        text = opened.read(length) if length < file.stat().st_size else b""
    try:
        said = cast("dict[str, Any]", json.loads(text))
        metadata = {str(key): str(value) for key, value in said.pop("__metadata__", {}).items()}
        tensors = {name: Tensor(each["dtype"], tuple(each["shape"])) for name, each in said.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as err:
        raise ModelError(
            "the file is no safetensors file, or only the beginning of one",
            where=str(file),
            fix="download it again, and compare its size with what the site says",
        ) from err
    require_whole(file)
    return Header(file, tensors, metadata)


def _require_file(file: Path) -> None:
    if (file / "model_index.json").is_file():
        raise ModelError(
            "that is a diffusers folder already", where=str(file), fix=f"use it as it is: model.base: {file}"
        )
    if not file.is_file():
        what = "that is a folder, and no single file" if file.is_dir() else "there is no such file"
        raise ModelError(what, where=str(file.absolute()), fix="name a .safetensors file")


def _require_no_other_format(file: Path, start: bytes) -> None:
    if start.startswith(b"GGUF"):
        raise ModelError(
            "that is a GGUF file: weights packed for drawing pictures, of which a training cannot be made",
            where=str(file),
            fix="take the same model as .safetensors in float16 or bfloat16",
        )
    if file.suffix.lower() in _PICKLES or start.startswith(_PICKLE_STARTS):
        raise ModelError(
            "that is a pickle, which can run any code while it is read, and is never opened here",
            where=str(file),
            fix="take the same model as .safetensors: most sites offer both, and who made the file can save "
            "it so with safetensors.torch.save_file",
        )
