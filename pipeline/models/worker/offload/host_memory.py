"""Host memory of streamed weights: of one process, or shared by the training processes of a machine."""

from __future__ import annotations

import os
from typing import Any, Protocol

import torch
from torch import Tensor, distributed


class HostMemory(Protocol):
    """Where the bytes of streamed blocks are kept on the host."""

    def hold(self, part: Tensor) -> Tensor:
        """Return a copy of `part`, bytes on any device, in host memory; nobody changes it afterwards."""
        ...


class OwnMemory:
    """Memory of this process, pinned if a GPU reads it."""

    def __init__(self, device: torch.device) -> None:
        """Prepare for copies to `device`."""
        self._is_pinned = device.type == "cuda"

    def hold(self, part: Tensor) -> Tensor:
        """See `HostMemory`."""
        memory = torch.empty(part.numel(), dtype=torch.uint8, pin_memory=self._is_pinned)
        return memory.copy_(part)


class SharedMemory:
    """Memory that all processes of a process group map, so that a machine holds frozen weights once.

    Rank 0 fills an anonymous file of Linux (`memfd_create`), the others map it through /proc:

        rank 0   create, fill -- path --> barrier, close
        others                            map, barrier

    The file has no name in any folder, and its memory is freed with the last process that maps it, however
    that process ends.
    """

    def __init__(self, device: torch.device) -> None:
        """Prepare for copies to `device`; every process of the default group does so."""
        self._is_pinned = device.type == "cuda"

    def hold(self, part: Tensor) -> Tensor:
        """See `HostMemory`; every process calls it in the same order, with the same bytes."""
        is_writer = distributed.get_rank() == 0
        descriptor, path = -1, [""]
        if is_writer:
            descriptor = os.memfd_create("latentline")
            os.truncate(descriptor, part.numel())
            path = [f"/proc/{os.getpid()}/fd/{descriptor}"]
        distributed.broadcast_object_list(path, src=0)

        memory = torch.from_file(path[0], shared=True, size=part.numel(), dtype=torch.uint8)
        if is_writer:
            memory.copy_(part)
        distributed.barrier()
        if is_writer:
            os.close(descriptor)
        if self._is_pinned:
            _pin(memory)
        return memory


def training_memory(device: torch.device) -> HostMemory:
    """Return memory for a training's streamed weights, shared if all processes are on one Linux machine."""
    is_shared = (
        distributed.is_initialized()
        and distributed.get_world_size() > 1
        and os.environ.get("LOCAL_WORLD_SIZE") == str(distributed.get_world_size())
        and hasattr(os, "memfd_create")
    )
    return SharedMemory(device) if is_shared else OwnMemory(device)


def _pin(memory: Tensor) -> None:
    """Make mapped memory readable for the GPU's copy engine, for the rest of the process."""
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
