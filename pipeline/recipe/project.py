"""The project root, where the relative paths of recipes and of the deployment file start."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def project_root() -> Path:
    """Return the folder that contains pipeline/; relative paths in a recipe start there."""
    return Path(__file__).resolve().parents[2]


def in_project(text: str) -> Path:
    """Return the path that a recipe's text refers to, relative to the project root; `~` is expanded."""
    return project_root() / Path(text).expanduser()


def path_in_recipe(path: Path) -> str:
    """Return `path` as a recipe writes it: relative if it is inside the project root, absolute otherwise."""
    # Symbolic links stay, so that messages show the path that the user knows.
    absolute_path, root = path.expanduser().absolute(), project_root()
    if absolute_path.is_relative_to(root):
        return absolute_path.relative_to(root).as_posix()
    return str(absolute_path)
