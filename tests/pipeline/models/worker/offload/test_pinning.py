"""Memory of streamed blocks on a system that refuses to pin more than a part of it, such as WSL 2."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipeline.errors import LaunchError
from pipeline.models.worker.offload.host_memory import OwnMemory
from pipeline.models.worker.offload.host_store import CHUNK_BYTES, CpuStore

REFUSAL = "CUDA error: out of memory"


class LimitedPinning:
    """Allocates some chunks, then fails as CUDA does. A CPU pins nothing, so they are ordinary memory."""

    def __init__(self, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        self.num_calls = 0

    def __call__(self, size: int) -> Tensor:
        self.num_calls += 1
        if self.num_calls > self.num_chunks:
            raise torch.AcceleratorError(f"{REFUSAL}\nCUDA kernel errors might be asynchronously reported")
        return torch.empty(size, dtype=torch.uint8)


def test_R25_blocks_beyond_the_memory_that_can_be_pinned_are_held_in_other_memory() -> None:
    pinning = LimitedPinning(2)
    memory = OwnMemory(torch.device("cuda"), pinning)
    store = CpuStore(torch.device("cpu"), 2, memory)
    random = torch.Generator().manual_seed(0)
    values = [torch.randn(CHUNK_BYTES // 4 + 100, generator=random) for _ in range(2)]
    weights = [nn.Parameter(value.clone(), requires_grad=False) for value in values]
    for weight in weights:
        store.add([weight])
    store.allocate()
    assert pinning.num_calls == 3, "one refusal is enough"

    for block, value in enumerate(values):
        store.fetch(block, 0)
        store.wait(block, 0)
        assert torch.equal(weights[block], value)
        store.evict(block, 0)
    assert memory.total_bytes == sum(store.block_bytes)
    assert memory.pinned_bytes == store.block_bytes[0]
    assert memory.refusal == REFUSAL
    assert memory.text() == (
        f"only 0.0 GiB of 0.1 GiB of streamed weights could be pinned in host memory ({REFUSAL}): "
        "copies of the rest are slower and do not overlap with computation"
    )


def test_nothing_is_pinned_for_a_cpu() -> None:
    pinning = LimitedPinning(0)
    memory = OwnMemory(torch.device("cpu"), pinning)
    memory.hold(torch.zeros(10, dtype=torch.uint8))
    assert (pinning.num_calls, memory.pinned_bytes, memory.refusal) == (0, 0, "")
    assert memory.text() == "0.0 GiB of streamed weights are in host memory"


def test_missing_host_memory_is_not_taken_for_missing_memory_of_the_gpu() -> None:
    """The advice for the GPU would be to stream more blocks, which takes more host memory."""
    too_large = torch.zeros(1, dtype=torch.uint8).expand(2**60)
    with pytest.raises(
        LaunchError, match=r"host memory ran out with 0\.0 GiB of streamed weights"
    ) as excinfo:
        OwnMemory(torch.device("cpu")).hold(too_large)
    assert "with a larger number" in excinfo.value.fix
