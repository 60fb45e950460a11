"""The project root, where the relative paths of recipes and of the deployment file start."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path, PurePath

from pipeline.escaping import without_secrets
from pipeline.storage.addresses import expanded


@cache
def project_root() -> Path:
    """Return the folder that contains pipeline/; relative paths in a recipe start there."""
    return Path(__file__).resolve().parents[2]


def in_project(text: str) -> Path:
    """Return the path that a recipe's text refers to, relative to the project root; `~` is expanded."""
    return project_root() / expanded(text)


def path_in_recipe(path: Path) -> str:
    """Return `path` as a recipe writes it: relative if it is inside the project root, absolute otherwise."""
    # Symbolic links stay, so that messages show the path that the user knows.
    absolute_path, root = expanded(str(path)).absolute(), project_root()
    if absolute_path.is_relative_to(root):
        return absolute_path.relative_to(root).as_posix()
    return str(absolute_path)


def shareable_path(text: str) -> str:
    """Return a path, an address or a Hub id as files that are passed on may contain it.

    A path inside the project root becomes relative to it. Of any other local path only the name is left,
    because its folders may name a user. Addresses lose passwords and query strings.
    """
    if "://" in text:
        # One link of a chain may be local, as in zip://photos::/data/photos.zip.
        return "::".join(_shareable_link(each) for each in text.split("::"))
    path = PurePath(text)
    if not path.is_absolute() and ".." not in path.parts:
        return text
    root = project_root()
    normal = PurePath(os.path.normpath(root / path))
    return normal.relative_to(root).as_posix() if normal.is_relative_to(root) else normal.name


def _shareable_link(link: str) -> str:
    protocol, separator, path = link.partition("://")
    if not separator:
        return shareable_path(link)
    if protocol.lower() in ("file", "local"):
        return f"{protocol}://{shareable_path(path)}"
    return without_secrets(link)
