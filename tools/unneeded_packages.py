"""List the installed packages that Latentline with some of its extras does not need.

    python tools/unneeded_packages.py gpu,postgres

deploy/Dockerfile removes these packages: requirements.lock has the tools of developers too. The program reads
pyproject.toml in the working directory and the metadata of the packages around it; it installs nothing.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

KEPT = {"latentline", "pip", "setuptools"}
"""The project itself, and the packages that install it."""

Needed = set[tuple[str, str]]
"""Canonical names of packages, each with an extra or ""."""


def main() -> None:
    """Print the names of all unneeded packages, one per line."""
    extras = sys.argv[1].split(",") if len(sys.argv) > 1 and sys.argv[1] else []
    for name in find_unneeded(Path("pyproject.toml"), extras):
        sys.stdout.write(f"{name}\n")


def find_unneeded(file: Path, extras: Iterable[str]) -> list[str]:
    """Return the installed packages that the project in `file` with the extras does not need, sorted."""
    wanted = project_requirements(file, extras)
    requirements: dict[str, list[str]] = {
        canonicalize_name(each.metadata["Name"]): each.requires or [] for each in distributions()
    }
    needed = find_needed(wanted, requirements)
    return sorted(requirements.keys() - {name for name, _ in needed} - KEPT)


def project_requirements(file: Path, extras: Iterable[str]) -> list[str]:
    """Return the requirements of the project in `file` with the extras.

    Raises:
        SystemExit: The project has no such extra.
    """
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    unknown = sorted(set(extras) - optional.keys())
    if unknown:
        sys.exit(f"unknown extras: {', '.join(unknown)}\n  in {file}\n  use some of {', '.join(optional)}")
    return [*project["dependencies"], *(line for extra in extras for line in optional[extra])]


def find_needed(lines: Iterable[str], requirements: dict[str, list[str]]) -> Needed:
    """Return the packages that the requirement `lines` need on this machine, directly and indirectly.

    Args:
        lines: Requirements such as `pandera[polars]>=0.35`.
        requirements: The requirements of each installed package by canonical name.
    """
    needed: Needed = set()
    waiting = [(Requirement(line), "") for line in lines]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for wanted in {"", *requirement.extras}:
            if (name, wanted) not in needed:
                needed.add((name, wanted))
                waiting += [(Requirement(line), wanted) for line in requirements.get(name, [])]
    return needed


if __name__ == "__main__":
    main()
