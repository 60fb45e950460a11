"""Imports of torch, diffusers and transformers, which take most of a launched process's start."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType

from pipeline.processes.imports import collector_paused

_HIDDEN = "bitsandbytes"


@contextmanager
def quick_imports() -> Generator[None]:
    """Import libraries in the body, without what the process does not need.

    Without a GPU, bitsandbytes is not found until `import_hidden` imports it. diffusers and peft import it
    wherever it is installed, and it imports torch's compiler.
    """
    with collector_paused():
        import torch

        if torch.cuda.device_count() == 0:
            # None is Python's way to say that a module cannot be imported.
            sys.modules.setdefault(_HIDDEN, None)  # pyright: ignore[reportArgumentType]
        yield


def import_hidden(name: str) -> ModuleType:
    """Import a module, also of a package that `quick_imports` hides."""
    package = name.partition(".")[0]
    if package == _HIDDEN and sys.modules.get(package) is None:
        sys.modules.pop(package, None)
    return importlib.import_module(name)
