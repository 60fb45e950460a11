"""Host memory of streamed weights: of one process, or shared by the training processes of a machine."""

from __future__ import annotations

import os
from typing import Any, Protocol, cast

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
        # Copies from memory that is not pinned would not overlap with computation.
        self._is_pinned = device.type == "cuda"

    def hold(self, part: Tensor) -> Tensor:
        memory = torch.empty(part.numel(), dtype=torch.uint8, pin_memory=self._is_pinned)
        return memory.copy_(part)


class SharedMemory:
    """Memory that the processes of one machine map, so that a machine holds frozen weights once.

    The first process of each machine fills an anonymous file of Linux (`memfd_create`), the rest map it
    through /proc:

        first    create, fill -- path --> barrier, close
        rest                              map, barrier
    """

    def __init__(self, device: torch.device, group: distributed.ProcessGroup | None = None) -> None:
        """Prepare for copies to `device`; `group` has this machine's processes, None if these are all."""
        self._is_pinned = device.type == "cuda"
        self._group = group
        self._first_rank = 0 if group is None else distributed.get_global_rank(group, 0)

    def hold(self, part: Tensor) -> Tensor:
        """See `HostMemory`; every process calls it in the same order, with the same bytes."""
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
        if self._is_pinned:
            _pin(memory)
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


def _pin(memory: Tensor) -> None:
    # `pin_memory` would copy it to other memory. The registration ends with the process.
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
