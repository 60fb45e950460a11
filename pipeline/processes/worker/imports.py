"""Imports of torch, diffusers and transformers, which take most of a launched process's start."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

from pipeline.processes.imports import collector_paused

_HIDDEN = "bitsandbytes"

_SCIPY_FUNCTIONS = {
    "scipy.integrate": (),
    "scipy.optimize": ("linear_sum_assignment",),
    "scipy.stats": (),
}
"""Modules of SciPy that diffusers and transformers import, and the functions that they take from them."""


@contextmanager
def quick_imports() -> Generator[None]:
    """Import libraries in the body, without what the process does not need.

    SciPy's large modules are imported when they are used. Without a GPU, bitsandbytes is not found until
    `import_hidden` imports it. diffusers and peft import it wherever it is installed, and it imports torch's
    compiler.
    """
    with collector_paused():
        import torch

        if torch.cuda.device_count() == 0:
            # None is Python's way to say that a module cannot be imported.
            sys.modules.setdefault(_HIDDEN, None)  # pyright: ignore[reportArgumentType]
        _put_off_scipy()
        yield


def _put_off_scipy() -> None:
    """Let SciPy's large modules be imported when one of their functions is called.

    diffusers' schedulers use them for beta sigmas, and transformers for losses of object detection. They take
    a sixth of all imports.
    """
    # Not `importlib.util.LazyLoader`: an import of a lazy module that is already known loads it.
    for name, functions in _SCIPY_FUNCTIONS.items():
        if name not in sys.modules:
            sys.modules[name] = _stand_in(name, functions)


def _stand_in(name: str, functions: tuple[str, ...]) -> ModuleType:
    """Return a module that is replaced by the real one when one of `functions` is called.

    Any other attribute replaces it at once.
    """
    spec = find_spec(name)
    assert spec is not None  # SciPy is a requirement
    # With its path and file, which imports and `inspect` look for in all modules.
    module: Any = module_from_spec(spec)

    def real(attribute: str) -> Any:
        if sys.modules.get(name) is module:
            del sys.modules[name]
        return getattr(importlib.import_module(name), attribute)

    def late(function: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            return real(function)(*arguments, **options)

        return call

    module.__getattr__ = real
    for function in functions:
        setattr(module, function, late(function))
    return module


def import_hidden(name: str) -> ModuleType:
    """Import a module, also of a package that `quick_imports` hides."""
    package = name.partition(".")[0]
    if package == _HIDDEN and sys.modules.get(package) is None:
        sys.modules.pop(package, None)
    return importlib.import_module(name)
