"""The device of a process, and the errors about a missing GPU and too little memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from pipeline.errors import LaunchError, TrainingError
from pipeline.processes.worker.devices import (
    allow_tf32,
    avoid_cudnn_attention,
    gpu_of,
    is_out_of_memory,
    out_of_memory_as,
    own_device,
    why_no_gpu,
)

IMPOSSIBLE_BYTES = 2**60

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine's GPU can be used")


def test_each_process_uses_the_gpu_with_its_local_rank() -> None:
    assert [gpu_of(process, 3) for process in range(3)] == ["cuda:0", "cuda:1", "cuda:2"]


def test_the_error_of_too_many_processes_states_the_number_of_gpus() -> None:
    with pytest.raises(LaunchError, match="process 3 has no GPU to itself: 2 GPUs are visible") as excinfo:
        gpu_of(2, 2)
    assert "num_processes" in excinfo.value.where
    assert "set it to 2" in excinfo.value.fix


@without_gpu
def test_without_a_gpu_the_device_is_the_cpu() -> None:
    assert own_device() == "cpu"


def test_float32_products_use_tf32_on_a_gpu_and_stay_exact_on_the_cpu() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        allow_tf32("cpu")
        assert torch.get_float32_matmul_precision() == before == "highest"
        allow_tf32("cuda:0")
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_attention_on_a_gpu_avoids_cudnn() -> None:
    assert torch.backends.cuda.cudnn_sdp_enabled()
    try:
        avoid_cudnn_attention("cpu")
        assert torch.backends.cuda.cudnn_sdp_enabled()
        avoid_cudnn_attention("cuda:0")
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


@without_gpu
def test_a_driver_that_torch_cannot_use_is_reported_with_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "version"
    assert why_no_gpu([driver]) is None, "a machine without a driver has no GPU to report"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.10\n", encoding="utf-8")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    reason = why_no_gpu([driver]) or ""
    expected = "without CUDA.*CUDA build" if torch.version.cuda is None else "cannot use.*driver"
    assert re.search(expected, reason)
    assert torch.__version__ in reason
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert why_no_gpu([driver]) is None, "the user hid the GPU"


def test_a_real_out_of_memory_error_is_distinguished_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as excinfo:
        torch.empty(IMPOSSIBLE_BYTES, dtype=torch.uint8)
    assert is_out_of_memory(excinfo.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_only_out_of_memory_errors_are_replaced() -> None:
    def make_error(memory: str) -> TrainingError:
        return TrainingError("too large", where="step 1", fix="lower the resolution")

    with pytest.raises(TrainingError, match="too large"), out_of_memory_as(make_error):
        torch.empty(IMPOSSIBLE_BYTES, dtype=torch.uint8)
    with pytest.raises(ValueError, match="another"), out_of_memory_as(make_error):
        raise ValueError("another error")
