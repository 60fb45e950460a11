from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeline.models.worker.offload import host_store as module
from pipeline.models.worker.offload.host_store import CpuStore

CPU = torch.device("cpu")


def parameters(seed: int) -> list[nn.Parameter]:
    """Return parameters of several dtypes and memory layouts, one of them without numbers."""
    random = torch.Generator().manual_seed(seed)
    plain = torch.randn(5, 3, generator=random)
    tensors = [
        plain,
        plain.to(torch.bfloat16).T,
        torch.randn(4, 2, 3, 3, generator=random).to(memory_format=torch.channels_last),
        torch.randn(6, 6, generator=random)[::2, 1:4],
        torch.randint(0, 255, (7,), dtype=torch.uint8, generator=random),
        torch.randn(3, 3, generator=random).to(torch.float8_e4m3fn),
        torch.randn((), generator=random),
        torch.empty(0, 3),
    ]
    return [nn.Parameter(tensor, requires_grad=False) for tensor in tensors]


@pytest.mark.parametrize("chunk_bytes", [256, 1 << 20])
def test_a_fetched_block_has_the_numbers_and_strides_of_the_original(
    monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    store, blocks = CpuStore(CPU, 2), [parameters(0), parameters(1)]
    for block in blocks:
        store.add(block)
    store.allocate()
    for number, slot in ((0, 1), (1, 0), (0, 0), (1, 1)):
        store.fetch(number, slot)
        store.wait(number, slot)
        for actual, expected in zip(blocks[number], parameters(number), strict=True):
            assert actual.dtype == expected.dtype
            assert torch.equal(actual.float(), expected.float())
            if expected.numel() == 15:
                assert actual.stride() == expected.stride()
        store.evict(number, slot)


def test_an_evicted_weight_is_nan_and_takes_no_memory_on_the_device() -> None:
    store, block = CpuStore(CPU, 1), parameters(0)
    store.add(block)
    store.allocate()
    assert [tuple(each.shape) for each in block] == [tuple(each.shape) for each in parameters(0)]
    for weight in block:
        assert weight.untyped_storage().nbytes() <= 4
        assert not weight.is_floating_point() or bool(weight.float().isnan().all())


def test_slots_have_the_size_of_the_largest_block() -> None:
    store = CpuStore(CPU, 2)
    for size in (100, 1000, 10):
        store.add([nn.Parameter(torch.zeros(size))])
    store.allocate()
    assert [slot.numel() for slot in store.slots] == [4096, 4096]
