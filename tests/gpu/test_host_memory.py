from __future__ import annotations

from pathlib import Path

import torch
from torch import distributed

from pipeline.models.worker.offload.host_memory import SharedMemory


def test_shared_memory_is_pinned_and_holds_the_bytes_of_the_device(device: str, tmp_path: Path) -> None:
    """The only process of its group also maps what it writes."""
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        part = torch.randint(0, 255, (5_000_000,), dtype=torch.uint8, device=device)
        memory = SharedMemory(torch.device(device)).hold(part)
    finally:
        distributed.destroy_process_group()
    assert memory.is_pinned() == (device == "cuda")
    assert memory.device.type == "cpu"
    copied = torch.empty_like(part).copy_(memory, non_blocking=True)
    assert torch.equal(copied, part)
