"""Host memory of streamed weights: of one process, or shared by the training processes of a machine.

A GPU copies from pinned memory while it computes. If the system refuses to pin more, as WSL 2 does from about
1 GB, the rest stays pageable: copies from it are slower and do not overlap, and the results are the same.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor, distributed

from pipeline.errors import LaunchError

_GIB = 2**30


class HostMemory(ABC):
    """Where the bytes of streamed blocks are kept on the host.

    Attributes:
        total_bytes: Bytes that are held.
        pinned_bytes: Bytes of them that are pinned.
        refusal: The system's error when it refused to pin more; empty if it did not.
    """

    def __init__(self, device: torch.device) -> None:
        """Prepare for copies to `device`."""
        self._device = device
        self.total_bytes = self.pinned_bytes = 0
        self.refusal = ""

    def hold(self, part: Tensor) -> Tensor:
        """Return a copy of `part`, bytes on any device, in host memory; nobody changes it afterwards.

        Raises:
            LaunchError: The host's memory ran out.
        """
        memory = self._copy(part)
        self.total_bytes += part.numel()
        return memory

    def text(self) -> str:
        """Return how much is held and pinned, for the log."""
        total, pinned = (f"{number / _GIB:.1f} GiB" for number in (self.total_bytes, self.pinned_bytes))
        if not self.refusal:
            return f"{total} of streamed weights are in host memory"
        return (
            f"only {pinned} of {total} of streamed weights could be pinned in host memory ({self.refusal}): "
            "copies of the rest are slower and do not overlap with computation"
        )

    @abstractmethod
    def _copy(self, part: Tensor) -> Tensor:
        """Return a copy of `part` in host memory, pinned if possible."""

    def _pin(self, num_bytes: int, pin: Callable[[], Tensor | None]) -> Tensor | None:
        """Call `pin` and count what it pins; None if the system refuses, now or in an earlier call."""
        if self._device.type != "cuda" or self.refusal:
            return None
        try:
            memory = pin()
        except RuntimeError as err:
            self.refusal = str(err).strip().partition("\n")[0]
            _forget_error(self._device)
            return None
        self.pinned_bytes += num_bytes
        return memory


class OwnMemory(HostMemory):
    """Memory of this process."""

    def __init__(self, device: torch.device, pinned: Callable[[int], Tensor] | None = None) -> None:
        """Prepare for copies to `device`; `pinned` replaces torch's allocation of pinned bytes."""
        super().__init__(device)
        self._pinned = pinned or _pinned_bytes

    def _copy(self, part: Tensor) -> Tensor:
        size = part.numel()
        memory = self._pin(size, lambda: self._pinned(size))
        if memory is None:
            memory = self._pageable(size)
        return memory.copy_(part)

    def _pageable(self, size: int) -> Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8)
        except (RuntimeError, MemoryError) as err:
            # Not as an error of the GPU's memory, for which the advice would be to stream more blocks.
            raise LaunchError(
                f"host memory ran out with {self.total_bytes / _GIB:.1f} GiB of streamed weights in it",
                where="training.offload, or text.offload for text encoders",
                fix="keep more of them on the GPU with a larger number, halve the base model's weights with "
                "training.quantize or training.compute, or free memory of the host",
            ) from err


class SharedMemory(HostMemory):
    """Memory that the processes of one machine map, so that a machine holds frozen weights once.

    The first process of each machine fills an anonymous file of Linux (`memfd_create`), the rest map it
    through /proc:

        first    create, fill -- path --> barrier, close
        rest                              map, barrier
    """

    def __init__(self, device: torch.device, group: distributed.ProcessGroup | None = None) -> None:
        """Prepare for copies to `device`; `group` has this machine's processes, None if these are all."""
        super().__init__(device)
        self._group = group
        self._first_rank = 0 if group is None else distributed.get_global_rank(group, 0)

    def _copy(self, part: Tensor) -> Tensor:
        # Every process calls `hold` in the same order, with the same bytes.
        is_writer = distributed.get_rank() == self._first_rank
        descriptor, path = -1, [""]
        if is_writer:
            # The file has no name in any folder, and its memory is freed with the last process that maps it,
            # however that process ends.
            descriptor = os.memfd_create("latentline")
            os.truncate(descriptor, part.numel())
            path = [f"/proc/{os.getpid()}/fd/{descriptor}"]
        distributed.broadcast_object_list(path, src=self._first_rank, group=self._group)

        memory = torch.from_file(path[0], shared=True, size=part.numel(), dtype=torch.uint8)
        if is_writer:
            memory.copy_(part)

        # Until here, the path in /proc exists only as long as the writer has its descriptor open.
        distributed.barrier(group=self._group)
        if is_writer:
            os.close(descriptor)
        self._pin(part.numel(), lambda: _registered(memory))
        return memory


def training_memory(device: torch.device) -> HostMemory:
    """Return memory for a training's streamed weights, shared by the processes of a Linux machine.

    Every process of a training calls it, because it may create process groups.
    """
    num_local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if num_local_processes == 1 or not distributed.is_initialized() or not hasattr(os, "memfd_create"):
        return OwnMemory(device)
    if num_local_processes == distributed.get_world_size():
        return SharedMemory(device)
    machine, _ = distributed.new_subgroups(group_size=num_local_processes)
    return SharedMemory(device, cast("distributed.ProcessGroup", machine))


def _pinned_bytes(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _registered(memory: Tensor) -> Tensor:
    # `pin_memory` would copy it to other memory. The registration ends with the process.
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    return memory


def _forget_error(device: torch.device) -> None:
    # CUDA reports a refused call once more, with the next kernel that starts.
    with suppress(RuntimeError, AssertionError):
        torch.ones((), device=device)
