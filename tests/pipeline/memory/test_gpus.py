"""The time that work takes on a GPU."""

from __future__ import annotations

import pytest

from pipeline.memory.gpus import BANDWIDTH_SHARE, GPUS, KERNEL_S, Gpu, Work, gpu_named


def test_a_step_takes_as_long_as_the_gpu_computes_or_the_cpu_starts_kernels() -> None:
    gpu = Gpu("", "", 24, 100e12, 1e12)
    work = Work(10, 50 * 10**12, 25 * 10**12, 9 * 10**11, 0)
    assert gpu.seconds(work) == pytest.approx(1.0 + 0.5 + 0.9 / BANDWIDTH_SHARE)
    assert gpu.seconds(work, float32=True) == pytest.approx(2.0 + 1.0 + 0.9 / BANDWIDTH_SHARE)

    small = Work(10**6, 10**12, 0, 0, 0)
    assert gpu.seconds(small) == pytest.approx(10**6 * KERNEL_S)
    assert gpu.computing_s(small) == pytest.approx(0.02)


def test_a_gpu_has_its_name_in_torch_and_variants_of_it_have_none() -> None:
    for gpu in GPUS:
        assert gpu_named(gpu.name) is gpu_named(gpu.device_name) is gpu
    for other in (None, "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 PCIe", "a GPU of 24 GB"):
        assert gpu_named(other) is None
