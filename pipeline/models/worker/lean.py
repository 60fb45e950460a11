"""diffusers without what encoding has no use for: imports are most of what one new image costs.

diffusers offers more where it finds more installed: adapters with peft, text encoders with transformers,
schedulers with SciPy; and it brings torch's compiler along. All of that is imported before its first class
can be used, and takes two thirds of the time. So here it is imported as on a machine where those packages are
missing, which diffusers allows for; what it then lacks stays lacking for the life of the process.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from pipeline.models.worker.quiet import keep_quiet

COMPILER = "torch._dynamo"

NOT_FOR_TEXT = ("peft", "scipy")
"""Packages that no text encoder needs."""

NOT_FOR_LATENTS = (
    *NOT_FOR_TEXT,
    "transformers",
    COMPILER,
    # Those that import the compiler themselves, or wrap it, where they are installed.
    "auto_round",
    "bitsandbytes",
    "flash_attn",
    "flashinfer",
    "gguf",
    "kernels",
    "modelopt",
    "optimum",
    "sageattention",
    "sdnq",
    "torchao",
    "torchvision",
    "xformers",
)
"""What no VAE needs."""


def import_autoencoders() -> None:
    """Import diffusers' autoencoders and little else, all of them silent.

    For a process that loads a VAE and no other model; it has not imported diffusers before.
    """
    with _without(NOT_FOR_LATENTS):
        keep_quiet(["diffusers"])
        importlib.import_module("diffusers.models.autoencoders")


def import_text_encoders() -> None:
    """Import what all pipelines of diffusers and text encoders of transformers share, silent.

    For a process that loads tokenizers and text encoders and no other model; as `import_autoencoders`.
    """
    with _without(NOT_FOR_TEXT):
        keep_quiet()
        importlib.import_module("diffusers.pipelines.pipeline_utils")
        importlib.import_module("transformers.modeling_utils")


@contextmanager
def _without(names: Sequence[str]) -> Generator[None]:
    """Whoever imports one of `names` meanwhile, for the first time, is told that it is not installed."""
    import torch

    hidden = [name for name in names if name not in sys.modules]
    disable, distributions = torch.compiler.disable, importlib.metadata.packages_distributions
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None is what says so
    if COMPILER in hidden:
        torch.compiler.disable = _unmarked
        # A table of all files of all packages, which diffusers looks only hidden ones up in.
        importlib.metadata.packages_distributions = dict
    try:
        yield
    finally:
        torch.compiler.disable = disable
        importlib.metadata.packages_distributions = distributions
        for name in hidden:
            sys.modules.pop(name, None)


def _unmarked(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """As the decorator `torch.compiler.disable` where nothing is ever compiled."""
    return function if function is not None else _unmarked
