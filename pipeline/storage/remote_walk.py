"""The files below a folder of a service that cannot list all files with a prefix."""

from __future__ import annotations

from typing import Any


def walk_files(files: Any, folder: str) -> dict[str, dict[str, Any]]:
    """Return the information about every file below a folder, by path.

    `find` of most file systems omits folders that cannot be listed; its option `on_error` works on the first
    level only.

    Args:
        files: An `fsspec.AbstractFileSystem`.
        folder: Path of the folder.

    Raises:
        FileNotFoundError: The folder does not exist.
        OSError: A folder cannot be listed.
    """
    found: dict[str, dict[str, Any]] = {}
    pending = [folder]
    while pending:
        path = pending.pop()
        try:
            infos: list[dict[str, Any]] = files.ls(path, detail=True)
        except FileNotFoundError:
            if path == folder:
                raise
            continue  # deleted since its parent was listed
        for info in infos:
            if info["type"] != "directory":
                found[info["name"]] = info
            elif info["name"].strip("/") != path.strip("/"):
                pending.append(info["name"])
    return found
