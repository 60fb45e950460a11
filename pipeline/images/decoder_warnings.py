"""Count the warnings of image decoders: one file can cause thousands of them, each with another text."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import PIL

from pipeline.errors import counted
from pipeline.escaping import printable

# Pillow and its plug-ins, by module for the filter and by folder for `showwarning`, which gets file names.
_DECODERS = r"(PIL|pillow_heif|pillow_jxl)\b"
_FOLDERS = tuple(str(Path(PIL.__file__).parents[1] / name) for name in ("PIL", "pillow_heif", "pillow_jxl"))


@contextmanager
def counted_warnings(log: Callable[[str], None]) -> Generator[None]:
    """Log how many warnings decoders gave during the body, in any thread, instead of each of them.

    Other warnings are shown as usual. Only one thread may be in such a context, because filters of warnings
    belong to the process; the threads that it starts are counted.
    """
    num_warnings = 0
    first_text = ""
    with warnings.catch_warnings():
        # "always" counts every warning, and does not convert any into an error.
        warnings.filterwarnings("always", module=_DECODERS)
        show = warnings.showwarning

        def count(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            nonlocal num_warnings, first_text
            if not filename.startswith(_FOLDERS):
                show(message, category, filename, lineno, file, line)
                return
            first_text = first_text or str(message)
            num_warnings += 1

        warnings.showwarning = count
        yield
    if num_warnings:
        text = printable(first_text)[:200]
        log(f"the image decoders gave {counted(num_warnings, 'warning')}, which are not shown; first: {text}")
