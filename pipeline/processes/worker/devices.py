"""Which device a launched process works on, and what a user is told of one that is missing or too small.

Importing this module imports torch.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from pipeline.errors import LatentlineError, LaunchError, counted

DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))
"""There, where NVIDIA's driver is loaded."""

_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "bad_alloc", "_ALLOC_FAILED", "out of memory")
"""In the text of a RuntimeError: memory ran out, as the CPU's allocators and CUDA's libraries say it."""


def own_device() -> str:
    """This process's own GPU, "cuda:0" and so on by its place among those of the launch; "cpu" without one.

    Raises:
        LaunchError: More processes were launched than there are GPUs.
    """
    if not torch.cuda.is_available():
        return "cpu"
    return gpu_of(int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count())


def gpu_of(process: int, num_gpus: int) -> str:
    """The GPU of the process with this index on its machine.

    Raises:
        LaunchError: There is none for it.
    """
    if process >= num_gpus:
        raise LaunchError(
            f"process {process + 1} has no GPU to itself: {counted(num_gpus, 'GPU is', 'GPUs are')} visible",
            where="accelerate.num_processes",
            fix=f"set it to {num_gpus} or less, or let CUDA_VISIBLE_DEVICES name more GPUs",
        )
    return f"cuda:{process}"


def why_no_gpu(driver_files: Sequence[Path] = DRIVER_FILES) -> str | None:
    """Why torch does not use the GPU of a machine that has NVIDIA's driver, and what helps.

    None where it does, where there is no driver, or where `CUDA_VISIBLE_DEVICES` hides all GPUs.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if hidden or torch.cuda.is_available() or not any(file.exists() for file in driver_files):
        return None
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA, so the GPU of this machine is not used: "
            "install torch's CUDA build of the same version"
        )
    try:
        torch.cuda.init()
        said = "it finds no GPU"
    except RuntimeError as err:
        said = str(err).strip().splitlines()[0]
    return (
        f"torch {torch.__version__} for CUDA {torch.version.cuda} cannot use this machine's GPU ({said}): "
        "update NVIDIA's driver, or see what nvidia-smi says"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the machine or of a GPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _OUT_OF_MEMORY)


@contextmanager
def memory_ran_out(explained: Callable[[str], LatentlineError]) -> Generator[None]:
    """Inside, running out of memory becomes the error that `explained` makes of what is known about it."""
    try:
        yield
    except (RuntimeError, MemoryError) as err:
        if not is_out_of_memory(err):
            raise
        raise explained(memory_text()) from err


def free_memory() -> None:
    """Give back what nothing uses any more, objects that hold one another included."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def memory_text() -> str:
    """What a GPU's memory is used for, as far as this process knows; empty on a CPU."""
    if not torch.cuda.is_available():
        return ""
    free, total = torch.cuda.mem_get_info()
    own = torch.cuda.memory_reserved()
    gib = 2**30
    return f"{own / gib:.1f} GiB held by this process, {free / gib:.1f} of {total / gib:.1f} GiB free"
