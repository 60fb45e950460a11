"""Bytes of one cache entry: a safetensors file; its exact size follows from shapes and dtypes.

    bytes 0-7       2040, little endian
    bytes 8-2047    JSON header of the safetensors format, padded with spaces
    from 2048       data of the tensors, in the header's order

The header's `__metadata__` holds one key, "latentline", with canonical JSON: `format`, `kind`, `key`, the
writer's metadata, and `checksum`, the SHA-256 of the canonical JSON without `checksum`, followed by the data.
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

from pipeline.errors import StoreError

Kind = Literal["latents", "text", "masks", "pictures", "features", "diagnoses", "influences", "captions"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Array = npt.NDArray[Any]

FORMAT = 1

# A constant, so that the size of an entry follows from its tensors before the file is read.
DATA_START = 2048
"""Offset of the data; a header of more than 2040 bytes is an error when the entry is written."""

LATENT = "latent"
"""Name of the tensor in an entry that holds one latent."""

MEAN, STD = MOMENTS = ("mean", "std")
"""Names of the two tensors in an entry that holds the moments of the VAE's posterior."""

MASK = "mask"
"""Name of the (1, h, w) tensor in a mask's entry: weights from 0 to 1."""

PICTURE = "picture"
"""Name of the uint8 (H, W, 3) tensor in the entry of a picture that was drawn for an evaluation."""

FEATURES = "features"
"""Name of the float32 (D,) tensor in an entry with a scorer's features of a picture, an image or a text."""

LOSSES = "losses"
"""Name of the float32 tensor in an entry with the losses of an image under several captions."""

INFLUENCE = "influence"
"""Name of the float32 (1,) tensor in an entry with the product of an image's and the holdout's gradient."""

CAPTION = "caption"
"""Name of the uint8 tensor in the entry of a model's caption: its UTF-8 bytes and a final newline."""

TEXT = "text_embedding"
"""Name of the (T, D) tensor in a caption's entry."""

# A single key, because the safetensors library writes several keys in random order.
_METADATA_KEY = "latentline"

# NumPy has no bfloat16, so arrays hold its bits.
_NUMPY_TYPES: dict[str, str] = {"float16": "<f2", "bfloat16": "<u2", "float32": "<f4", "uint8": "|u1"}
_ITEM_BYTES = {name: np.dtype(code).itemsize for name, code in _NUMPY_TYPES.items()}
_SAFETENSORS_TYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "uint8": "U8"}
_STATED_TYPES = {code: name for name, code in _SAFETENSORS_TYPES.items()}
_CHECKSUM_CHARACTERS = hashlib.sha256().digest_size * 2


@dataclass(frozen=True)
class TensorSpec:
    """Dtype ("float16", "bfloat16", "float32" or "uint8") and shape of one tensor.

    If `ragged`, the first dimension may be shorter, down to 1: a text embedding may be as long as its
    caption.
    """

    dtype: str
    shape: tuple[int, ...]
    ragged: bool = False

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's data, or its maximum size if `ragged`."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]

    def admits(self, stated: TensorSpec) -> bool:
        """Return whether a tensor of the given dtype and shape satisfies this specification."""
        if not self.ragged:
            return stated == self
        same_kind = (stated.dtype, stated.shape[1:]) == (self.dtype, self.shape[1:])
        return same_kind and len(stated.shape) > 0 and 0 < stated.shape[0] <= self.shape[0]


@dataclass(frozen=True, slots=True)
class EntrySpec:
    """Specification of an entry, from which its path and size follow before it is read.

    Attributes:
        kind: Kind of the entry, and the name of its folder.
        key: At least 8 lower-case hex digits.
        tensors: Specification of each tensor by name.
    """

    kind: Kind
    key: str
    tensors: Mapping[str, TensorSpec]

    @property
    def data_bytes(self) -> int:
        """Size of the data of all tensors; a maximum if `ragged`."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def ragged(self) -> bool:
        """Whether only the entry's header has the length of a tensor."""
        return any(tensor.ragged for tensor in self.tensors.values())

    @property
    def file_bytes(self) -> int:
        """Exact size of the file; the maximum size if `ragged`."""
        return DATA_START + self.data_bytes

    def may_have(self, num_bytes: int) -> bool:
        """Return whether a file of this size can be the entry."""
        return num_bytes == self.file_bytes or (self.ragged and num_bytes < self.file_bytes)

    def admits(self, stated: Mapping[str, TensorSpec]) -> bool:
        """Return whether an entry with the given tensors satisfies this specification."""
        return stated.keys() == self.tensors.keys() and all(
            tensor.admits(stated[name]) for name, tensor in self.tensors.items()
        )

    def holding(self, stated: Mapping[str, TensorSpec]) -> EntrySpec:
        """Return the specification of the same entry with exactly the given tensors."""
        return EntrySpec(self.kind, self.key, stated)


class WrongEntryError(Exception):
    """An entry does not match its specification; the text is the reason."""


def damaged_error(where: str, err: WrongEntryError) -> StoreError:
    """Return the error for an entry that is wrong although it was verified before."""
    return StoreError(
        f"a cache entry is damaged: {err}",
        where=where,
        # A job trusts an unchanged stat, so it would not find bit rot.
        fix="run latentline verify <recipe> --repair, which encodes damaged entries again",
    )


def serialise(spec: EntrySpec, tensors: Mapping[str, Array], metadata: Mapping[str, Any]) -> bytes:
    """Return the bytes of an entry's file; equal arguments give equal bytes on every machine.

    Arrays of bfloat16 are passed as their bits, in uint16. The metadata are JSON-serialisable.

    Raises:
        ValueError: The tensors do not match `spec`, a value is not finite, or the header is too long.
    """
    if set(tensors) != set(spec.tensors):
        raise ValueError(f"tensors must be {sorted(spec.tensors)}, got {sorted(tensors)}")

    arrays: dict[str, Array] = {}
    for name, tensor in spec.tensors.items():
        # The safetensors library reads the array's memory by its address, so it must be contiguous.
        array = np.asarray(tensors[name], order="C")
        given = TensorSpec(tensor.dtype, array.shape)
        if not tensor.admits(given) or array.dtype != np.dtype(_NUMPY_TYPES[tensor.dtype]):
            raise ValueError(f"{name} must be {tensor.dtype} {tensor.shape}, got {array.dtype} {array.shape}")
        if not _all_finite(array):
            raise ValueError(f"{name} contains NaN or infinite values")
        arrays[name] = array

    # The header's length must be known before the checksum, which covers it; so serialise once with a blank.
    facts = {**metadata, "format": FORMAT, "kind": spec.kind, "key": spec.key}
    unpadded = _serialise(spec, arrays, {**facts, "checksum": " " * _CHECKSUM_CHARACTERS}, "")
    header_bytes = int.from_bytes(unpadded[:8], "little")
    needed = len(unpadded[8 : 8 + header_bytes].rstrip(b" "))
    if needed > DATA_START - 8:
        raise ValueError(f"the header must have at most {DATA_START - 8} bytes, got {needed}")

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


def _has_checksum(metadata: Mapping[str, Any], data: memoryview) -> bool:
    try:
        return _checksum(metadata, data) == metadata.get("checksum")
    except RecursionError:  # nested as deeply as can be read, which is deeper than can be written
        return False


def _canonical(facts: Mapping[str, Any]) -> str:
    # Sorted, so that equal facts give equal bytes on every machine.
    return json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def parse(spec: EntrySpec, raw: bytes, *, verify: bool) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the arrays and the metadata of an entry's file; `verify` also checks checksum and finite values.

    Raises:
        WrongEntryError: The entry does not match `spec`, or fails verification.
    """
    # Size, key and shapes first: they are cheap, and name the defect better than a checksum.
    if not spec.may_have(len(raw)):
        raise _wrong_size(len(raw), spec)
    header = read_header(raw[:DATA_START])
    metadata = stated_metadata(header)
    if (metadata.get("kind"), metadata.get("key")) != (spec.kind, spec.key):
        stored = f"{metadata.get('kind')} {metadata.get('key')}"
        raise WrongEntryError(f"expected the entry {spec.kind} {spec.key}, got {stored}")

    stated = stated_tensors(header)
    if not spec.admits(stated):
        raise WrongEntryError(f"expected {_described(spec.tensors)}, got {_described(stated)}")

    # The exact size of a ragged entry follows only from the length in its header.
    if len(raw) != spec.holding(stated).file_bytes:
        raise _wrong_size(len(raw), spec.holding(stated))

    try:
        tensors = dict(safetensors.deserialize(raw))
    except safetensors.SafetensorError as err:
        raise WrongEntryError(f"the header is damaged: {err}") from err
    if verify and not _has_checksum(metadata, memoryview(raw)[DATA_START:]):
        raise WrongEntryError("the checksum does not match the content")

    arrays = {
        name: np.frombuffer(tensors[name]["data"], _NUMPY_TYPES[tensor.dtype]).reshape(tensor.shape)
        for name, tensor in stated.items()
    }

    # The checksum also matches if the writer's values were not finite.
    if verify and not all(_all_finite(array) for array in arrays.values()):
        raise WrongEntryError("it contains NaN or infinite values")
    return arrays, metadata


def read_header(start: bytes) -> dict[str, Any]:
    """Parse the JSON header in the first `DATA_START` bytes of a file; raises WrongEntryError without one."""
    if int.from_bytes(start[:8], "little") != DATA_START - 8 or len(start) < DATA_START:
        raise WrongEntryError("it does not start with the header of a cache entry")
    try:
        header = json.loads(start[8:])
    except (ValueError, RecursionError) as err:  # RecursionError: deep nesting such as [[[[...
        raise WrongEntryError("the header is damaged: it is not valid JSON") from err
    if not isinstance(header, dict):
        raise WrongEntryError("the header is damaged: it is not a JSON object")
    return cast("dict[str, Any]", header)


def stated_metadata(header: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata in a header, including `kind`, `key` and `checksum`.

    Raises:
        WrongEntryError: The metadata is damaged, or its `format` is not `FORMAT`.
    """
    try:
        metadata = json.loads(header["__metadata__"][_METADATA_KEY])
    except (KeyError, TypeError, ValueError, RecursionError) as err:
        raise WrongEntryError("the metadata in the header is missing or damaged") from err
    if not isinstance(metadata, dict):
        raise WrongEntryError("the metadata in the header is not a JSON object")

    metadata = cast("dict[str, Any]", metadata)
    if metadata.get("format") != FORMAT:
        raise WrongEntryError(f"expected format {FORMAT}, got {metadata.get('format')}")
    return metadata


def stated_tensors(header: dict[str, Any]) -> dict[str, TensorSpec]:
    """Return the dtypes and shapes in a header; raises WrongEntryError if it is damaged."""
    try:
        return {
            name: TensorSpec(_STATED_TYPES[tensor["dtype"]], tuple(map(_length, tensor["shape"])))
            for name, tensor in header.items()
            if name != "__metadata__"
        }
    except (KeyError, TypeError) as err:
        raise WrongEntryError("the header describes a tensor without a supported dtype and shape") from err


def _length(stated: Any) -> int:
    # Whoever may write a shared cache may have written any JSON, and lengths are compared.
    if type(stated) is not int:
        raise TypeError(f"a length must be an integer, got {stated!r:.20}")
    return stated


def _wrong_size(num_bytes: int, spec: EntrySpec) -> WrongEntryError:
    limit = "at most " if spec.ragged else ""
    return WrongEntryError(f"expected {limit}{spec.file_bytes} bytes, got {num_bytes} bytes")


def _described(tensors: Mapping[str, TensorSpec]) -> str:
    return ", ".join(
        f"{name} {tensor.dtype} {tensor.shape}{' or shorter' if tensor.ragged else ''}"
        for name, tensor in sorted(tensors.items())
    )


def _all_finite(array: Array) -> bool:
    if array.dtype == np.uint16:  # bfloat16: an exponent of ones is NaN or infinite
        return bool(((array & 0x7F80) != 0x7F80).all())
    return bool(np.isfinite(array).all())
