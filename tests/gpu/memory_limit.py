"""A limit for the memory that this process may still allocate, so that memory really runs out."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pipeline.processes.worker.devices import free_memory

MIB = 2**20

_STATUS = Path("/proc/self/statm")
"""File whose first number is the size of this process's address space, in pages."""


@contextmanager
def memory_left(device: str, num_bytes: int) -> Generator[None]:
    """Let this process allocate about `num_bytes` more on the device until the end of the context.

    On a CPU the limit is one of the address space. The allocators keep freed memory for later use, so that
    tests should leave a margin of tens of MiB.
    """
    free_memory()
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + num_bytes) / total)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return

    if not _STATUS.exists():
        pytest.skip("only Linux limits the memory of a process")
    # Imported late, because Windows does not have it.
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(_STATUS.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
