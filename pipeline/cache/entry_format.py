"""The bytes of one store entry: a safetensors file whose size follows from its shapes and dtypes alone.

A caption's entry may be as long as the caption: then its size follows from what its own header states, which
must be no longer than the encoders take, and from the length that the table recorded when it was verified.

    bytes 0-7       2040, little endian
    bytes 8-2047    JSON header of the safetensors format, padded with spaces
    from 2048       the tensors' data, in the header's order

The header's `__metadata__` holds one key, "latentline", with canonical JSON: `format`, `kind`, `key`, what
the writer adds, and `checksum`, the sha256 over the canonical JSON without it and the data. (With several
keys the safetensors library would write them in random order.)
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt
import safetensors

Kind = Literal["latents", "text"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Array = npt.NDArray[Any]

FORMAT = 1
DATA_START = 2048
"""Offset of the data in each entry. A header that needs more than 2040 bytes is refused when written."""

LATENT = "latent"
"""Name of the tensor in a latent's entry; or there are these two, the moments of the VAE's posterior."""

MEAN, STD = MOMENTS = ("mean", "std")

TEXT = "text_embedding"
"""Name of the tensor of a caption's entry that is (T, D), and may be as long as the caption."""

_METADATA_KEY = "latentline"
_NUMPY_TYPES: dict[str, str] = {"float16": "<f2", "bfloat16": "<u2", "float32": "<f4"}
_ITEM_BYTES = {name: np.dtype(code).itemsize for name, code in _NUMPY_TYPES.items()}
_SAFETENSORS_TYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
_STATED_TYPES = {code: name for name, code in _SAFETENSORS_TYPES.items()}
_CHECKSUM_CHARACTERS = hashlib.sha256().digest_size * 2


@dataclass(frozen=True)
class TensorSpec:
    """What one tensor of an entry must be.

    Attributes:
        dtype: "float16", "bfloat16" or "float32".
        shape: Of the tensor; the longest one where `ragged`.
        ragged: Whether its first edge may be any from 1 to that of `shape`.
    """

    dtype: str
    shape: tuple[int, ...]
    ragged: bool = False

    @property
    def num_bytes(self) -> int:
        """Of the tensor's data; where it is ragged, the most it may be."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]

    def admits(self, stated: TensorSpec) -> bool:
        """Whether a tensor of exactly the stated dtype and shape is what this one must be."""
        if not self.ragged:
            return stated == self
        same_kind = (stated.dtype, stated.shape[1:]) == (self.dtype, self.shape[1:])
        return same_kind and len(stated.shape) > 0 and 0 < stated.shape[0] <= self.shape[0]


@dataclass(frozen=True, slots=True)
class EntrySpec:
    """What an entry must be, known before it is read: all of it, but for the length of ragged tensors.

    Attributes:
        kind: "latents" or "text"; decides the folder.
        key: Lower-case hex digits, at least 8.
        tensors: By name.
    """

    kind: Kind
    key: str
    tensors: Mapping[str, TensorSpec]

    @property
    def data_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def ragged(self) -> bool:
        """Whether the entry's own header has to say how long a tensor is."""
        return any(tensor.ragged for tensor in self.tensors.values())

    @property
    def file_bytes(self) -> int:
        """Exact size of the entry's file; of a ragged one, the most it may be."""
        return DATA_START + self.data_bytes

    def may_have(self, num_bytes: int) -> bool:
        """Whether a file of so many bytes can be the entry."""
        return num_bytes == self.file_bytes or (self.ragged and num_bytes < self.file_bytes)

    def admits(self, stated: Mapping[str, TensorSpec]) -> bool:
        """Whether an entry that holds exactly the stated tensors is what this one must be."""
        return stated.keys() == self.tensors.keys() and all(
            tensor.admits(stated[name]) for name, tensor in self.tensors.items()
        )

    def holding(self, stated: Mapping[str, TensorSpec]) -> EntrySpec:
        """The same entry with exactly the stated tensors."""
        return EntrySpec(self.kind, self.key, stated)


class WrongEntryError(Exception):
    """An entry is not what its specification says; the text is the reason."""


def serialise(spec: EntrySpec, tensors: Mapping[str, Array], metadata: Mapping[str, Any]) -> bytes:
    """The bytes of an entry's file; the same for the same arguments, always and everywhere.

    Raises:
        ValueError: The tensors are not what `spec` says, a value is not finite, or the header does not fit.
    """
    if set(tensors) != set(spec.tensors):
        raise ValueError(f"tensors {sorted(tensors)} given for {sorted(spec.tensors)}")
    arrays: dict[str, Array] = {}
    for name, tensor in spec.tensors.items():
        array = np.asarray(tensors[name], order="C")
        given = TensorSpec(tensor.dtype, array.shape)
        if not tensor.admits(given) or array.dtype != np.dtype(_NUMPY_TYPES[tensor.dtype]):
            raise ValueError(f"{name} is {array.dtype} {array.shape}, not {tensor.dtype} {tensor.shape}")
        if not _all_finite(array):
            raise ValueError(f"{name} holds values that are not finite")
        arrays[name] = array
    facts = {**metadata, "format": FORMAT, "kind": spec.kind, "key": spec.key}
    unpadded = _serialise(spec, arrays, {**facts, "checksum": " " * _CHECKSUM_CHARACTERS}, "")
    header_bytes = int.from_bytes(unpadded[:8], "little")
    needed = len(unpadded[8 : 8 + header_bytes].rstrip(b" "))
    if needed > DATA_START - 8:
        raise ValueError(f"the header needs {needed} bytes, {DATA_START - 8} are there")
    facts["checksum"] = _checksum(facts, memoryview(unpadded)[8 + header_bytes :])
    return _serialise(spec, arrays, facts, " " * (DATA_START - 8 - needed))


def _serialise(spec: EntrySpec, arrays: dict[str, Array], facts: dict[str, Any], padding: str) -> bytes:
    specs = {
        name: safetensors.TensorSpec(
            dtype=spec.tensors[name].dtype,
            shape=list(array.shape),
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in arrays.items()
    }
    return bytes(safetensors.serialize(specs, {_METADATA_KEY: _canonical(facts) + padding}))


def _checksum(facts: Mapping[str, Any], data: memoryview) -> str:
    text = _canonical({name: value for name, value in facts.items() if name != "checksum"})
    checksum = hashlib.sha256(text.encode("ascii"))
    checksum.update(data)
    return checksum.hexdigest()


def _canonical(facts: Mapping[str, Any]) -> str:
    return json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def parse(spec: EntrySpec, raw: bytes, *, verify: bool) -> tuple[dict[str, Array], dict[str, Any]]:
    """(arrays, metadata) of an entry's file.

    Raises:
        WrongEntryError: It is not what `spec` says; with `verify`, also when its checksum does not hold or a
            value is not finite.
    """
    if not spec.may_have(len(raw)):
        raise _wrong_size(len(raw), spec)
    header = read_header(raw[:DATA_START])
    metadata = stated_metadata(header)
    if (metadata.get("kind"), metadata.get("key")) != (spec.kind, spec.key):
        raise WrongEntryError(f"it is the entry of {metadata.get('kind')} {metadata.get('key')}")
    stated = stated_tensors(header)
    if not spec.admits(stated):
        raise WrongEntryError(f"it holds {_described(stated)}, {_described(spec.tensors)} is expected")
    if len(raw) != spec.holding(stated).file_bytes:
        raise _wrong_size(len(raw), spec.holding(stated))
    try:
        tensors = dict(safetensors.deserialize(raw))
    except safetensors.SafetensorError as err:
        raise WrongEntryError(f"its header is damaged: {err}") from err
    if verify and _checksum(metadata, memoryview(raw)[DATA_START:]) != metadata.get("checksum"):
        raise WrongEntryError("its checksum does not hold")
    arrays = {
        name: np.frombuffer(tensors[name]["data"], _NUMPY_TYPES[tensor.dtype]).reshape(tensor.shape)
        for name, tensor in stated.items()
    }
    if verify and not all(_all_finite(array) for array in arrays.values()):
        raise WrongEntryError("it holds values that are not finite")
    return arrays, metadata


def read_header(start: bytes) -> dict[str, Any]:
    """The JSON header in the first `DATA_START` bytes of a file.

    Raises:
        WrongEntryError: They are not the start of an entry.
    """
    if int.from_bytes(start[:8], "little") != DATA_START - 8 or len(start) < DATA_START:
        raise WrongEntryError("its header is not that of an entry")
    try:
        header = json.loads(start[8:])
    except ValueError as err:
        raise WrongEntryError("its header is damaged") from err
    if not isinstance(header, dict):
        raise WrongEntryError("its header is damaged")
    return cast("dict[str, Any]", header)


def stated_metadata(header: dict[str, Any]) -> dict[str, Any]:
    """What the header says beside its tensors, key and checksum among it.

    Raises:
        WrongEntryError: It says nothing that makes sense.
    """
    try:
        metadata = json.loads(header["__metadata__"][_METADATA_KEY])
    except (KeyError, TypeError, ValueError) as err:
        raise WrongEntryError("its metadata is damaged") from err
    if not isinstance(metadata, dict) or cast("dict[str, Any]", metadata).get("format") != FORMAT:
        raise WrongEntryError(f"it is not of format {FORMAT}")
    return cast("dict[str, Any]", metadata)


def stated_tensors(header: dict[str, Any]) -> dict[str, TensorSpec]:
    """What the header says of each tensor.

    Raises:
        WrongEntryError: It says nothing that makes sense.
    """
    try:
        return {
            name: TensorSpec(_STATED_TYPES[tensor["dtype"]], tuple(tensor["shape"]))
            for name, tensor in header.items()
            if name != "__metadata__"
        }
    except (KeyError, TypeError) as err:
        raise WrongEntryError("its header is damaged") from err


def _wrong_size(num_bytes: int, spec: EntrySpec) -> WrongEntryError:
    most = "at most " if spec.ragged else ""
    return WrongEntryError(f"it has {num_bytes} bytes, {most}{spec.file_bytes} are expected")


def _described(tensors: Mapping[str, TensorSpec]) -> str:
    return ", ".join(
        f"{name} {tensor.dtype} {tensor.shape}{' or shorter' if tensor.ragged else ''}"
        for name, tensor in sorted(tensors.items())
    )


def _all_finite(array: Array) -> bool:
    if array.dtype == np.uint16:
        return bool(((array & 0x7F80) != 0x7F80).all())
    return bool(np.isfinite(array).all())
