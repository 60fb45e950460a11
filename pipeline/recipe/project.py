"""The project root, where the relative paths of recipes and of the deployment file start."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path, PurePath

from pipeline.errors import FileAccessError
from pipeline.escaping import without_secrets
from pipeline.storage.addresses import expanded

PROJECT_VARIABLE = "LATENTLINE_PROJECT"
"""Environment variable with the project root, for processes that start in another folder."""

MARKER = ".latentline-project"
"""File in each project folder that `latentline init` has written."""

_CODE_ROOT = Path(__file__).resolve().parents[2]
"""A checkout, or the folder of installed packages."""

_used = set[Path]()
"""The folder that `use_project` has chosen for this process; at most one."""


@cache
def project_root() -> Path:
    """Return the folder where relative paths in a recipe start.

    It is the folder in `LATENTLINE_PROJECT`, or else the one of `use_project`, or else the nearest of the
    working directory and its parents that `latentline init` has written, or else the checkout that contains
    this file.

    Raises:
        FileAccessError: There is no such folder.
    """
    if chosen := os.environ.get(PROJECT_VARIABLE, ""):
        folder = expanded(chosen).absolute()
        if not folder.is_dir():
            raise FileAccessError(
                f"the project folder does not exist: {folder}",
                where=f"environment variable {PROJECT_VARIABLE}",
                fix="correct the path, or unset the variable and work in the project folder",
            )
        return folder
    for folder in _used:
        return folder
    is_checkout = (_CODE_ROOT / "pyproject.toml").is_file()
    here = Path.cwd()
    for folder in (here, *here.parents):
        # A checkout inside of a project folder remains a project of its own.
        if (folder / MARKER).is_file() or (is_checkout and folder == _CODE_ROOT):
            return folder
    if is_checkout:
        return _CODE_ROOT
    raise FileAccessError(
        "the working directory is not in a project folder",
        where=str(here),
        fix=f"latentline init FOLDER creates one; work in it, or set {PROJECT_VARIABLE} to an existing one",
    )


def use_project(folder: Path) -> None:
    """Use `folder` as the project root of this process, unless `LATENTLINE_PROJECT` names one for all.

    Raises:
        FileAccessError: The process has another project root.
    """
    if os.environ.get(PROJECT_VARIABLE):
        return
    # All code of a process has one root: with two, the second project would write into the first one.
    if project_root.cache_info().currsize == 0:
        _used.add(folder.absolute())
    if project_root().resolve() != folder.resolve():
        raise FileAccessError(
            f"this process already reads the recipes of another project folder: {project_root()}",
            where=str(folder),
            fix="load each project in a process of its own, such as a code location of its own; or set "
            f"{PROJECT_VARIABLE} to the folder where the relative paths of all recipes start",
        )


def project_variables() -> dict[str, str]:
    """Return the variable that a process in another folder needs to find the project; none for a checkout."""
    # A checkout may have another path on another machine, where the process finds it by its own code.
    return {} if project_root() == _CODE_ROOT else {PROJECT_VARIABLE: str(project_root())}


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
