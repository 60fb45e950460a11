"""Host memory of streamed weights, and the slots on the device that they are copied to.

All tensors of a block are in one sequence of bytes, on the host as in a slot:

    | tensor 0 | padding | tensor 1 | padding | ...      each tensor begins at a multiple of 256 bytes

A parameter on the device keeps its identity: its data refers to a slot while its block is in use, and to a
single NaN, expanded to the parameter's shape, at all other times.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from pipeline.models.worker.offload.host_memory import HostMemory, OwnMemory

ALIGNMENT = 256
"""Alignment of tensors in bytes, as in CUDA's own allocations."""

CHUNK_BYTES = 32 << 20
"""Size of host allocations. torch rounds pinned ones up to a power of two."""


@dataclass(frozen=True)
class _Place:
    """A tensor's place in the bytes of its block."""

    parameter: nn.Parameter
    names: tuple[str, ...]  # path in the parameter; see `plain_tensors`
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    evicted: Tensor  # data while the block is not on the device

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * self.shape.numel()

    def refer_to(self, data: Tensor) -> None:
        # By name, because moving a network to its own device replaces the tensors of packed weights.
        tensor: Any = self.parameter
        for name in self.names:
            tensor = getattr(tensor, name)
        tensor.data = data

    def view(self, buffer: Tensor) -> Tensor:
        flat = buffer[self.offset : self.offset + self.num_bytes].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


class HostStore(ABC):
    """Streamed blocks on the host, and slots for some of them on the device; see `ring.Copier`.

    Attributes:
        memory: Where the blocks' bytes are on the host.
        slots: Bytes of each slot, on the device.
    """

    def __init__(self, device: torch.device, num_slots: int, memory: HostMemory | None = None) -> None:
        """Begin without blocks; add all of them, then call `allocate`."""
        self._device = device
        self.memory = memory or OwnMemory(device)
        self._num_slots = num_slots
        self._places: list[list[_Place]] = []
        self._chunks: list[list[Tensor]] = []
        self.slots: list[Tensor] = []

    def add(self, parameters: Sequence[nn.Parameter]) -> None:
        """Move the parameters of the next block to the host."""
        places: list[_Place] = []
        end = 0
        tensors = [(each, *part) for each in parameters for part in plain_tensors(each)]
        for parameter, names, tensor in tensors:
            shape, stride = tensor.shape, _dense_stride(tensor)
            place = _Place(parameter, names, end, tensor.dtype, shape, stride, self._evicted(tensor))
            places.append(place)
            end += -(-place.num_bytes // ALIGNMENT) * ALIGNMENT

        # Arranged on the device, where the weights of the block are.
        buffer = torch.zeros(end, dtype=torch.uint8, device=self._device)
        for place, (_, _, tensor) in zip(places, tensors, strict=True):
            place.view(buffer).copy_(tensor.detach())
            place.refer_to(place.evicted)
        self._places.append(places)
        self._chunks.append([self.memory.hold(part) for part in buffer.split(CHUNK_BYTES)])

    def allocate(self) -> None:
        """Allocate the slots, each for the largest block."""
        size = max(sum(chunk.numel() for chunk in chunks) for chunks in self._chunks)
        for _ in range(min(self._num_slots, len(self._chunks))):
            self.slots.append(torch.zeros(size, dtype=torch.uint8, device=self._device))

    @property
    def block_bytes(self) -> list[int]:
        """Number of bytes of each block, padding included."""
        return [sum(chunk.numel() for chunk in chunks) for chunks in self._chunks]

    def fetch(self, block: int, slot: int) -> None:
        self._copy(self._chunks[block], slot)

    def wait(self, block: int, slot: int) -> None:
        self._wait(slot)
        for place in self._places[block]:
            place.refer_to(place.view(self.slots[slot]))

    def release(self, slot: int) -> None:
        self._release(slot)

    def evict(self, block: int, slot: int) -> None:
        for place in self._places[block]:
            place.refer_to(place.evicted)

    def _evicted(self, tensor: Tensor) -> Tensor:
        # A read of an evicted weight cannot stay unnoticed: it makes the loss NaN, and the run ends with an
        # error. Integers have no NaN, but packed weights have scales, which do.
        value = float("nan") if tensor.is_floating_point() else 0
        return torch.tensor(value).to(self._device, tensor.dtype).expand(tensor.shape)

    @abstractmethod
    def _copy(self, chunks: Sequence[Tensor], slot: int) -> None:
        """Start to copy bytes from the host to the beginning of a slot."""

    @abstractmethod
    def _wait(self, slot: int) -> None:
        """Let later computation wait for the last copy into a slot."""

    @abstractmethod
    def _release(self, slot: int) -> None:
        """Let later copies into a slot wait for the computation enqueued so far."""


class CpuStore(HostStore):
    """Copies between two parts of the host's memory, which end before the call returns."""

    def _copy(self, chunks: Sequence[Tensor], slot: int) -> None:
        _copy_chunks(chunks, self.slots[slot])

    def _wait(self, slot: int) -> None: ...

    def _release(self, slot: int) -> None: ...


class CudaStore(HostStore):
    """Copies on a stream of its own, so that copies from pinned memory overlap with computation."""

    def __init__(self, device: torch.device, num_slots: int, memory: HostMemory | None = None) -> None:
        super().__init__(device, num_slots, memory)
        self._stream = torch.cuda.Stream(device)
        self._copied = [torch.cuda.Event() for _ in range(num_slots)]
        self._used = [torch.cuda.Event() for _ in range(num_slots)]

    def allocate(self) -> None:
        super().allocate()
        # The slots are filled with zeros on the stream that computes, and copies must not overtake that.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def _copy(self, chunks: Sequence[Tensor], slot: int) -> None:
        self._stream.wait_event(self._used[slot])
        with torch.cuda.stream(self._stream):
            _copy_chunks(chunks, self.slots[slot])
            self._copied[slot].record(self._stream)

    def _wait(self, slot: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._copied[slot])

    def _release(self, slot: int) -> None:
        self._used[slot].record(torch.cuda.current_stream(self._device))


def host_store(device: torch.device, num_slots: int, memory: HostMemory | None = None) -> HostStore:
    """Return the store for a device."""
    return (CudaStore if device.type == "cuda" else CpuStore)(device, num_slots, memory)


def plain_tensors(tensor: Tensor, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Tensor]]:
    """Return (path, tensor) of the tensors that hold a tensor's numbers; packed weights have several."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [(path, tensor)]
    names, _ = cast("Any", tensor).__tensor_flatten__()
    return [plain for name in names for plain in plain_tensors(getattr(tensor, name), (*path, name))]


def _copy_chunks(chunks: Sequence[Tensor], slot: Tensor) -> None:
    parts = slot[: sum(chunk.numel() for chunk in chunks)].split(CHUNK_BYTES)
    for chunk, part in zip(chunks, parts, strict=True):
        part.copy_(chunk, non_blocking=True)


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    # Strides with gaps or overlaps would not fit in the block's bytes, so such a tensor is made contiguous.
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return torch.empty(tensor.shape, device="meta").stride()
            expected *= size
    return tensor.stride()
