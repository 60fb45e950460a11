"""The device of a launched process, and errors about a missing GPU or too little memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from pipeline.errors import LatentlineError, LaunchError, counted
from pipeline.processes.machines import machines_of_this_process
from pipeline.reporting import progress

DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))
"""Files that exist while NVIDIA's driver is loaded."""

_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "bad_alloc", "_ALLOC_FAILED", "out of memory")
"""Parts of RuntimeError messages of the CPU allocators and the CUDA libraries that mean out of memory."""


def own_device() -> str:
    """Return this process's GPU, such as "cuda:0", by its local rank; "cpu" without a GPU.

    Raises:
        LaunchError: The launch has more processes than the machine has GPUs.
    """
    if not torch.cuda.is_available():
        return "cpu"
    num_machines = machines_of_this_process().number
    return gpu_of(int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count(), num_machines)


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


def why_no_gpu(driver_files: Sequence[Path] = DRIVER_FILES) -> str | None:
    """Return why torch cannot use the GPU of a machine with NVIDIA's driver, and the fix.

    The result is None if torch uses the GPU, if no driver is loaded, or if `CUDA_VISIBLE_DEVICES` hides all
    GPUs.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if hidden or torch.cuda.is_available() or not any(file.exists() for file in driver_files):
        return None
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA and cannot use the GPU of this machine: "
            "install the CUDA build of the same version"
        )
    try:
        torch.cuda.init()
        reason = "torch finds no GPU"
    except RuntimeError as err:
        reason = str(err).strip().splitlines()[0]
    return (
        f"torch {torch.__version__} for CUDA {torch.version.cuda} cannot use this machine's GPU ({reason}): "
        "update NVIDIA's driver, or check the output of nvidia-smi"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error means that the machine or a GPU ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _OUT_OF_MEMORY)


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
