"""The device of a launched process, and errors about a missing, unusable or old GPU and too little memory."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from pipeline.errors import LatentlineError, LaunchError, counted
from pipeline.processes.machines import machines_of_this_process
from pipeline.reporting import progress

DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/usr/lib/wsl/lib/libcuda.so.1"))
"""Files that exist if this machine, or this container, has a GPU of NVIDIA: on Linux, and on WSL 2.

WSL 2 has /dev/dxg for GPUs of all makers. /proc/driver/nvidia is visible in containers without a GPU too.
"""

_BF16_CAPABILITY = (8, 0)
"""Lowest compute capability with bf16 in hardware: Ampere. torch emulates bf16 on older GPUs."""

_ON_CPU = "to compute on the CPU, set the environment variable CUDA_VISIBLE_DEVICES to nothing"

_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "bad_alloc", "_ALLOC_FAILED", "out of memory")
"""Parts of RuntimeError messages of the CPU allocators and the CUDA libraries that mean out of memory."""

_ONEDNN_OUT_OF_MEMORY = "could not create a primitive"
"""Complete message of oneDNN without memory for a kernel; longer ones are about unsupported operations."""


def own_device() -> str:
    """Return this process's GPU, such as "cuda:0", by its local rank; "cpu" without a GPU.

    Raises:
        LaunchError: The launch has more processes than the machine has GPUs, or torch cannot use the GPU.
    """
    if not torch.cuda.is_available():
        require_no_gpu()
        return "cpu"
    num_machines = machines_of_this_process().number
    device = gpu_of(int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count(), num_machines)
    require_kernels(device)
    return device


def gpu_of(local_rank: int, num_gpus: int, num_machines: int = 1) -> str:
    """Return the GPU of the process with this index on its machine; raises LaunchError if there is none."""
    if local_rank >= num_gpus:
        visible = counted(num_gpus, "GPU is", "GPUs are")
        raise LaunchError(
            f"process {local_rank + 1} has no GPU to itself: {visible} visible",
            where="accelerate.num_processes",
            fix=f"set it to {num_gpus * num_machines} or less, or list more GPUs in CUDA_VISIBLE_DEVICES",
        )
    return f"cuda:{local_rank}"


def allow_tf32(device: str) -> None:
    """Let float32 matrix products on a GPU use TF32, as convolutions do by default."""
    if device.startswith("cuda"):
        # TF32 rounds the factors to 10 bits of mantissa and is several times faster.
        torch.set_float32_matmul_precision("high")


def avoid_cudnn_attention(device: str) -> None:
    """Keep attention on a GPU from using cuDNN, whose gradients can be NaN on Hopper cards.

    Seen on an H100 with cuDNN 9.19 (docs/gpus.md); for cuDNN 9.20 see
    https://github.com/pytorch/pytorch/issues/196678.
    """
    if device.startswith("cuda"):
        torch.backends.cuda.enable_cudnn_sdp(False)


def require_no_gpu(driver_files: Sequence[Path] = DRIVER_FILES) -> None:
    """Raise LaunchError if the machine has a GPU that torch cannot use, unless the user has hidden it.

    Work that was meant for a GPU would take days on the CPU.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if hidden or not any(file.exists() for file in driver_files):
        return
    where = "the GPU of this machine"
    if torch.version.cuda is None:
        raise LaunchError(
            f"torch {torch.__version__} is built without CUDA and cannot use the GPU of this machine",
            where=where,
            fix=f"install the CUDA build of the same version; {_ON_CPU}",
        )
    try:
        torch.cuda.init()
        reason = "torch finds no GPU"
    except RuntimeError as err:
        reason = str(err).strip().splitlines()[0]
    raise LaunchError(
        f"torch {torch.__version__} for CUDA {torch.version.cuda} cannot use this machine's GPU ({reason})",
        where=where,
        fix=f"update NVIDIA's driver, and check the output of nvidia-smi; {_ON_CPU}",
    )


def require_kernels(device: str) -> None:
    """Raise LaunchError if torch is built without kernels for this GPU, whose first use would fail."""
    architectures = torch.cuda.get_arch_list()
    if torch.version.hip is not None or not architectures:
        return
    capability = torch.cuda.get_device_capability(device)
    if any(_runs_on(capability, each) for each in architectures):
        return
    name = torch.cuda.get_device_name(device)
    raise LaunchError(
        f"torch {torch.__version__} has no kernels for {name}, a GPU of compute capability "
        f"{capability[0]}.{capability[1]}: it is built for {', '.join(architectures)}",
        where=device,
        fix="install a build of torch for an older version of CUDA if the GPU is old, or a newer torch if it "
        f"is new (https://pytorch.org/get-started/locally); {_ON_CPU}",
    )


def _runs_on(capability: tuple[int, int], architecture: str) -> bool:
    """Return whether a GPU runs code for an architecture such as "sm_86", "sm_90a" or "compute_120"."""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
    if match is None:
        return False
    kind, major, minor, variant = match.groups()
    built_for = (int(major), int(minor))
    if variant:
        return capability == built_for
    # Intermediate code is compiled for any later GPU, machine code runs on later ones of the same generation.
    return built_for <= capability and (kind == "compute" or built_for[0] == capability[0])


def emulates_bf16(device: str) -> bool:
    """Return whether torch emulates bf16 on this device: on NVIDIA's GPUs before Ampere."""
    # accelerate accepts them, because torch says that it supports bf16.
    if not device.startswith("cuda") or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) < _BF16_CAPABILITY


def bf16_text(device: str) -> str:
    """Return what bf16 costs on a GPU that emulates it."""
    return (
        f"{torch.cuda.get_device_name(device)} has no bf16 in hardware: torch emulates it without the GPU's "
        "matrix units, and attention takes much more memory"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error means that the machine or a GPU ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    return str(error) == _ONEDNN_OUT_OF_MEMORY or any(mark in str(error) for mark in _OUT_OF_MEMORY)


@contextmanager
def out_of_memory_as(make_error: Callable[[str], LatentlineError]) -> Generator[None]:
    """Replace an out-of-memory error of the body by the error that `make_error` returns for `memory_text`."""
    try:
        yield
    except (RuntimeError, MemoryError) as err:
        if not is_out_of_memory(err):
            raise
        raise make_error(memory_text()) from err


def free_memory() -> None:
    """Free unused memory: reference cycles, and torch's caches of GPU memory and of pinned host memory."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.accelerator.empty_host_cache()


def free_bytes(device: str) -> int | None:
    """Return the free memory of a GPU; None on a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else None


def used_memory_text() -> str:
    """Return the memory in use for a progress line: this process's GPU memory, or its resident memory."""
    if not torch.cuda.is_initialized():
        return progress.memory_text()
    return f"{torch.cuda.memory_reserved() / 2**30:.1f} GiB of GPU memory"


def memory_text() -> str:
    """Describe the use of the GPU's memory; empty on a CPU."""
    if not torch.cuda.is_available():
        return ""
    free, total = torch.cuda.mem_get_info()
    own = torch.cuda.memory_reserved()
    gib = 2**30
    return f"{own / gib:.1f} GiB held by this process, {free / gib:.1f} of {total / gib:.1f} GiB free"
