"""The package that an ImportError of transformers names."""

from __future__ import annotations

import re

_COMMAND = re.compile(r"pip install (?:-U |--upgrade )?([A-Za-z0-9][\w.\-\[\]]*)")
_LIBRARY = re.compile(r"requires the (torchvision|sentencepiece|protobuf) library", re.IGNORECASE)
"""A message that links to the installation page of a library in place of a command."""


def install_command(err: BaseException) -> str | None:
    """Return the command that installs what is missing; None if the error does not name a package.

    The name of a module is not used: another package may have it, such as cv2, which opencv-python has.
    """
    if not isinstance(err, ImportError):
        return None
    text = str(err)
    named = _COMMAND.search(text) or _LIBRARY.search(text)
    return None if named is None else f"pip install {named[1].lower()}"
