"""The layers of a LoRA file in any layout and of any program, read and written without the base model.

A layer adds scale * up @ down to a weight; `pipeline.trained_lora.export.lora_files` describes the layouts.
Here, the keys are never translated: a layer of kohya's layout that stands for query, key and value is one
layer. So the files of a merge must have the same layout, and the base model is not needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from pipeline.errors import LoraFileError, TrainingError, counted
from pipeline.storage.atomic import write_bytes
from pipeline.storage.regular_files import open_regular
from pipeline.trained_lora.export.lora_files import (
    ADAPTER_METADATA_KEY,
    LoraFile,
    folded,
    lora_file,
    peft_scale,
    read_lora_file,
)

Array: TypeAlias = npt.NDArray[np.float32]

Dtype = Literal["float32", "bfloat16", "float16"]

DTYPES: Mapping[Dtype, float] = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
"""Distance from 1 to the next number by dtype; the most exact dtype is the first."""

_ENDINGS = {".lora_A.weight": ".lora_B.weight", ".lora_down.weight": ".lora_up.weight"}
"""Endings of the keys of down and up matrices."""

_ALPHA = ".alpha"

_MAX_KEYS = 3


@dataclass(frozen=True)
class Layer:
    """One layer: `down` (rank, in) or (rank, in, height, width), `up` (out, rank) or (out, rank, 1, 1)."""

    down: Array
    up: Array
    scale: float = 1.0

    @property
    def rank(self) -> int:
        """Rows of `down`."""
        return len(self.down)

    @property
    def matrices(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """`down` (rank, in * height * width) and `up` (out, rank) with the scale, in double precision."""
        down = self.down.reshape(self.rank, -1).astype(np.float64)
        return down, self.up.reshape(len(self.up), -1).astype(np.float64) * self.scale

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the adapted weight."""
        return (len(self.up), *self.down.shape[1:])


@dataclass(frozen=True)
class LoraLayers:
    """Layers of a file by key.

    Attributes:
        is_diffusers: Whether the matrices are named lora_A and lora_B, as diffusers and peft do.
        dtype: Most exact dtype among the file's matrices.
        metadata: The file's own metadata.
    """

    layers: Mapping[str, Layer]
    is_diffusers: bool
    dtype: Dtype
    metadata: Mapping[str, str]


def read_layers(path: Path) -> LoraLayers:
    """Return the layers of the LoRA file at `path`, found as in `lora_file`.

    Raises:
        LoraFileError: The file cannot be read, is of another kind, such as LoKr or DoRA, or has numbers that
            are not finite.
        OSError: It does not exist.
    """
    path = lora_file(path)
    open_regular(path).close()
    try:
        file = read_lora_file(path)
    except TrainingError as err:
        raise LoraFileError(err.what, where=err.where, fix="pass a .safetensors file of a LoRA") from err
    endings = next(
        (each for each in _ENDINGS.items() if any(key.endswith(each[0]) for key in file.tensors)), None
    )
    if endings is None:
        raise _other_kind(path, file.tensors)
    down_ending, up_ending = endings

    layers: dict[str, Layer] = {}
    unread = set(file.tensors)
    for down_key in sorted(key for key in file.tensors if key.endswith(down_ending)):
        key = down_key.removesuffix(down_ending)
        down, up = file.tensors[down_key], file.tensors.get(key + up_ending)
        if up is None or up.ndim != down.ndim or up.shape[1] != len(down) or up[0, 0].size != 1:
            fix = "use a complete file of a LoRA, LoCon included"
            raise LoraFileError(
                f"the up matrix of {key} is missing or does not fit", where=str(path), fix=fix
            )
        layer = Layer(down, up, _scale(file, key, len(down)))
        if not (_is_finite(down) and _is_finite(up) and np.isfinite(layer.scale)):
            fix = "use a file of an earlier step: the training that wrote it has diverged, or it is damaged"
            raise LoraFileError(f"{key} has numbers that are not finite", where=str(path), fix=fix)
        layers[key] = layer
        unread -= {down_key, key + up_ending, key + _ALPHA}
    if unread:
        raise _other_kind(path, unread)
    return LoraLayers(layers, down_ending == ".lora_A.weight", _dtype(path), file.metadata)


def write_layers(path: Path, layers: LoraLayers) -> None:
    """Write a file with these layers that all readers of its layout apply alike; see `lora_files`."""
    tensors: dict[str, Array] = {}
    alphas: dict[str, float] = {}
    down_ending, up_ending = list(_ENDINGS.items())[0 if layers.is_diffusers else 1]
    for key, layer in layers.layers.items():
        # diffusers takes one alpha for all layers of a UNet in kohya's layout, so all have the first one's.
        # Readers of the other layouts assume that alpha is the rank where they know no other.
        is_kohya = not layers.is_diffusers and key.startswith("lora_")
        alpha = alphas.setdefault(network_of(key), float(layer.rank)) if is_kohya else float(layer.rank)
        down, up = folded(layer.down, layer.up, layer.scale * layer.rank / alpha)
        tensors |= {key + down_ending: down, key + up_ending: up}
        if not layers.is_diffusers:
            tensors[key + _ALPHA] = np.array(alpha, np.float32)
    metadata = {name: text for name, text in layers.metadata.items() if name != ADAPTER_METADATA_KEY}
    write_bytes(path, _serialized(tensors, layers.dtype, metadata, where=path))


def network_of(key: str) -> str:
    """Return the part of the model that a layer belongs to, such as "unet", "lora_te1" or "transformer"."""
    return "_".join(key.split("_", 2)[:2]) if key.startswith("lora_") else key.partition(".")[0]


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a LoRA file, as other programs compute it."""
    with lora_file(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _scale(file: LoraFile, key: str, rank: int) -> float:
    alpha = file.tensors.get(key + _ALPHA)
    if alpha is not None:
        return float(alpha.item()) / rank
    return peft_scale(file, key) if ADAPTER_METADATA_KEY in file.metadata else 1.0


def _dtype(path: Path) -> Dtype:
    from safetensors import safe_open

    with safe_open(path, framework="np") as opened:
        found = {opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118 - not a dict
    codes = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    names = {name for code, name in codes.items() if code in found}
    return next(dtype for dtype in DTYPES if dtype in names)


def _other_kind(path: Path, keys: Iterable[str]) -> LoraFileError:
    shown = sorted(keys)
    listed = ", ".join(shown[:_MAX_KEYS]) + (", ..." if len(shown) > _MAX_KEYS else "")
    return LoraFileError(
        f"{counted(len(shown), 'tensor is', 'tensors are')} not part of a LoRA: {listed}",
        where=str(path),
        fix="use a file with down and up matrices only; DoRA, LoHa, LoKr and OFT cannot be added up, but a "
        "LoHa or LoKr that Latentline trained is saved as a LoRA",
    )


def _serialized(
    tensors: Mapping[str, Array], dtype: Dtype, metadata: Mapping[str, str], *, where: Path
) -> bytes:
    from safetensors import TensorSpec, serialize

    # Alphas are numbers that must stay exact.
    stored = {key: _rounded(each, dtype if each.ndim else "float32") for key, each in tensors.items()}
    broken = next((key for key, (_, values) in stored.items() if not _is_finite(values)), None)
    if broken is not None:
        raise LoraFileError(
            f"a number in {broken} is too large for {dtype}",
            where=str(where),
            fix="use --dtype bfloat16 or float32",
        )
    specs = {
        key: TensorSpec(
            dtype=name, shape=list(values.shape), data_ptr=values.ctypes.data, data_len=values.nbytes
        )
        for key, (name, values) in stored.items()
    }
    return bytes(serialize(specs, dict(metadata)))


def _rounded(values: Array, dtype: Dtype) -> tuple[Dtype, npt.NDArray[Any]]:
    """Return contiguous numbers of the dtype; those of bfloat16 are unsigned integers of the same bits."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):  # the caller reports it
            return dtype, np.ascontiguousarray(values, dtype)

    # A bfloat16 is the upper half of a float32, rounded to the nearest, and to even between two.
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return dtype, ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _is_finite(values: npt.NDArray[Any]) -> bool:
    if values.dtype == np.uint16:
        return bool(((values & 0x7F80) != 0x7F80).all())  # the exponent of infinity and NaN
    return bool(np.isfinite(values).all())
