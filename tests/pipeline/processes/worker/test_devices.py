"""The device of a process, and the errors about a missing GPU and too little memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline.errors import LaunchError, TrainingError
from pipeline.processes.worker.devices import (
    allow_tf32,
    avoid_cudnn_attention,
    emulates_bf16,
    gpu_of,
    is_out_of_memory,
    out_of_memory_as,
    own_device,
    require_no_gpu,
)
from pipeline.recipe import AccelerateSettings, project_root
from pipeline.trained_lora.worker.distributed import make_accelerator

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
def test_R23_a_gpu_that_torch_cannot_use_is_an_error_unless_the_user_has_hidden_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "nvidiactl"
    require_no_gpu([driver])
    driver.touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(LaunchError) as excinfo:
        require_no_gpu([driver])
    what, fix = ("without CUDA", "CUDA build") if torch.version.cuda is None else ("cannot use", "driver")
    assert what in excinfo.value.what
    assert torch.__version__ in excinfo.value.what
    assert fix in excinfo.value.fix
    assert "CUDA_VISIBLE_DEVICES to nothing" in excinfo.value.fix

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    require_no_gpu([driver])


CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
"""Architectures of torch 2.11 for CUDA 13.0."""


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int], list[str]], None]:
    """Return a function that makes torch report one GPU of a compute capability."""

    def report(capability: tuple[int, int], architectures: list[str]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: architectures)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "a card")

    return report


@pytest.mark.parametrize("capability", [(7, 5), (8, 9), (9, 0), (12, 0)])
def test_a_gpu_with_kernels_is_used(
    card: Callable[[tuple[int, int], list[str]], None], capability: tuple[int, int]
) -> None:
    card(capability, CUDA_13)
    assert own_device() == "cuda:0"


@pytest.mark.parametrize(
    ("capability", "architectures"),
    [((6, 1), CUDA_13), ((7, 0), CUDA_13), ((12, 1), ["sm_90", "sm_120a"]), ((10, 0), ["sm_90"])],
)
def test_a_gpu_without_kernels_is_an_error_before_its_first_use(
    card: Callable[[tuple[int, int], list[str]], None], capability: tuple[int, int], architectures: list[str]
) -> None:
    card(capability, architectures)
    with pytest.raises(LaunchError, match="has no kernels for a card") as excinfo:
        own_device()
    assert f"{capability[0]}.{capability[1]}" in excinfo.value.what
    assert "older version of CUDA" in excinfo.value.fix


def test_intermediate_code_runs_on_later_gpus(card: Callable[[tuple[int, int], list[str]], None]) -> None:
    card((12, 1), ["sm_80", "compute_90"])
    assert own_device() == "cuda:0"


def test_R24_bf16_is_emulated_before_ampere(card: Callable[[tuple[int, int], list[str]], None]) -> None:
    card((7, 5), CUDA_13)
    assert emulates_bf16("cuda:0")
    assert not emulates_bf16("cpu")
    with pytest.raises(TrainingError, match="a card has no bf16 in hardware") as excinfo:
        make_accelerator(AccelerateSettings(), mixed_precision="bf16", find_unused_parameters=False)
    assert "fp16" in excinfo.value.fix
    card((8, 0), CUDA_13)
    assert not emulates_bf16("cuda:0")


def test_a_real_out_of_memory_error_is_distinguished_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as excinfo:
        torch.empty(IMPOSSIBLE_BYTES, dtype=torch.uint8)
    assert is_out_of_memory(excinfo.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


CONVOLUTIONS_IN_LITTLE_MEMORY = """
import resource
import psutil
import torch
from pipeline.processes.worker.devices import is_out_of_memory

torch.set_num_threads(1)
convolution = torch.nn.Conv2d(64, 64, 3, padding=1)
for mebibytes in range(4, 64, 4):
    limit = psutil.Process().memory_info().vms + mebibytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        # Each size has a kernel of its own, which oneDNN keeps.
        for height in range(64, 128):
            convolution(torch.empty(1, 64, height, 64))
    except RuntimeError as err:
        message, is_memory = str(err), is_out_of_memory(err)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(is_memory, message)
"""


def test_convolutions_without_memory_for_a_kernel_are_out_of_memory() -> None:
    pytest.importorskip("resource", reason="only POSIX limits the memory of a process")
    command = [sys.executable, "-c", CONVOLUTIONS_IN_LITTLE_MEMORY]
    completed = subprocess.run(command, cwd=project_root(), capture_output=True, text=True, check=True)
    lines = completed.stdout.splitlines()
    assert "True could not create a primitive" in lines
    assert [line for line in lines if line.startswith("False")] == []
    unsupported = "could not create a primitive descriptor for a convolution forward propagation primitive"
    assert not is_out_of_memory(RuntimeError(unsupported))


def test_only_out_of_memory_errors_are_replaced() -> None:
    def make_error(memory: str) -> TrainingError:
        return TrainingError("too large", where="step 1", fix="lower the resolution")

    with pytest.raises(TrainingError, match="too large"), out_of_memory_as(make_error):
        torch.empty(IMPOSSIBLE_BYTES, dtype=torch.uint8)
    with pytest.raises(ValueError, match="another"), out_of_memory_as(make_error):
        raise ValueError("another error")
