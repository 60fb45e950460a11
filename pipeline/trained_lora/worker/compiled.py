"""Compiled blocks: how often they are compiled again, and a warning if they no longer are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

RECOMPILE_LIMIT = 64
"""Minimum number of times that a block may be compiled.

Each bucket, number of tokens, and pass with or without gradients may need its own. torch's default is 8.
"""

_LOGGER = "torch._dynamo"
_LIMIT = "recompile_limit"
"""Part of the name of the limit in torch's message that a function is no longer compiled."""


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
