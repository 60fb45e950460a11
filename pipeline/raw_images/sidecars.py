"""Names of caption files next to images."""

from __future__ import annotations


def sidecar_path(path: str, suffix: str) -> str:
    """Where the caption file of the image at `path` lies: its name with the last suffix replaced."""
    return path[: len(path) - len(last_suffix(path))] + suffix


def last_suffix(path: str) -> str:
    """With its dot; empty where the name has none, or is nothing else."""
    name = path.rpartition("/")[2]
    stem, dot, suffix = name.rpartition(".")
    return dot + suffix if stem else ""
