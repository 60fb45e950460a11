"""Compiled blocks: whether and where they are compiled, and a warning if they no longer are."""

from __future__ import annotations

import logging
import os
import shutil
import sysconfig
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipeline.errors import TrainingError
from pipeline.models.worker.loading import component_class

if TYPE_CHECKING:
    from pipeline.models.worker.family import WorkerFamily
    from pipeline.recipe import Recipe

RECOMPILE_LIMIT = 64
"""Minimum number of times that a block may be compiled.

Each bucket, number of tokens, and pass with or without gradients may need its own. torch's default is 8.
"""

_LOGGER = "torch._dynamo"
_LIMIT = "recompile_limit"
"""Part of the name of the limit in torch's message that a function is no longer compiled."""

_HEADER = Path(sysconfig.get_path("include"), "Python.h")


def missing_for_kernels(header: Path = _HEADER) -> str | None:
    """Return what this machine lacks to compile a kernel for a GPU; None if it can."""
    if find_spec("triton") is None:
        return "the package triton, which torch's CUDA builds for Linux depend on"

    # Triton compiles the function that starts a kernel as an extension of Python.
    if not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang", "cc"))):
        return "a C compiler"
    return None if header.exists() else f"{header}, the header of Python"


@dataclass(frozen=True)
class CompiledBlocks:
    """The resolved value of `training.compile`.

    Attributes:
        applies: Whether blocks are compiled.
        reason: Sentence for the log; empty unless the recipe's value is "auto".
    """

    applies: bool
    reason: str = ""

    def applied(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the resolved value."""
        training = recipe.training.model_copy(update={"compile": self.applies})
        return recipe.model_copy(update={"training": training})


def compiled_blocks(family: WorkerFamily, recipe: Recipe, device: str) -> CompiledBlocks:
    """Resolve `training.compile` for this device, before the base model is loaded.

    Raises:
        TrainingError: The value is true, and this machine cannot compile for the device.
    """
    value = recipe.training.compile
    if value != "auto":
        if value:
            require_compiler(device)
        return CompiledBlocks(value)
    obstacle = _obstacle(family, recipe, device)
    if obstacle is None:
        return CompiledBlocks(True, "training.compile: auto compiles the blocks, which takes minutes once")
    return CompiledBlocks(False, f"training.compile: auto does not compile the blocks: {obstacle}")


def _obstacle(family: WorkerFamily, recipe: Recipe, device: str) -> str | None:
    """Return why "auto" leaves blocks as they are; None if they are compiled."""
    training = recipe.training
    if not device.startswith("cuda"):
        return "the training runs on a CPU"
    denoiser = component_class(family, family.spec.denoiser_name)
    obstacles = (
        (
            not getattr(denoiser, "_repeated_blocks", None),
            f"diffusers lists no blocks of {denoiser.__name__}",
        ),
        (recipe.accelerate.shard, "accelerate.shard is set"),
        (training.lora.timestep_ranks is not None, "training.lora.timestep_ranks is set"),
        # Compilation of torchao's and bitsandbytes' layers fails for some models, see docs/gpus.md.
        (training.quantize != "none" and training.compute == "none", "training.quantize is set"),
    )
    found = next((text for applies, text in obstacles if applies), None)
    missing = missing_for_kernels()
    return found if found or missing is None else f"{missing} is missing"


def require_compiler(device: str) -> None:
    """Raise TrainingError if blocks cannot be compiled for this device, which the first step would find."""
    missing = missing_for_kernels() if device.startswith("cuda") else None
    if missing is not None:
        raise TrainingError(
            f"compile: true needs {missing}",
            where="training.compile",
            fix="install gcc and python3-dev (on Debian: apt install gcc python3-dev), or set compile: false",
        )


def allow_recompilation() -> None:
    """Let blocks be compiled for all sizes of a dataset."""
    config = torch.compiler.config

    # A higher limit of the environment stays.
    config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)


class _Fallbacks(logging.Handler):
    def __init__(self, warn: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._warn = warn
        self._count = 0

    def emit(self, record: logging.LogRecord) -> None:
        if _LIMIT not in record.getMessage():
            return
        self._count += 1
        self._warn(
            f"compiled blocks fall back to eager execution for further sizes ({self._count} so far), because "
            "a block was compiled too often: use fewer bucket sizes, or set training.compile: false"
        )


@contextmanager
def fallbacks_reported(warn: Callable[[str], None]) -> Generator[None]:
    """Call `warn` with a sentence whenever torch stops compiling a block within the context."""
    # torch reports it in its log only, and the run is slower from then on (FAILURES G05).
    logger, handler = logging.getLogger(_LOGGER), _Fallbacks(warn)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
