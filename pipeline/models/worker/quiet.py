"""Silence of the model libraries: what takes long is told by Latentline's own progress."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module


def keep_quiet(libraries: Sequence[str] = ("diffusers", "transformers")) -> None:
    """Keep loading bars and hints of these libraries, which it imports, out of this process's output."""
    for library in libraries:
        logging = import_module(f"{library}.utils.logging")
        logging.set_verbosity_error()
        logging.disable_progress_bar()
