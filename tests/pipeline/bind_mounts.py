"""A fixture that makes bind mounts."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def bind() -> Iterator[Callable[[Path, Path], None]]:
    """Return a function that mounts its first folder at its second until the test ends."""
    mount_points: list[Path] = []
    mount = shutil.which("mount")
    if mount is None:
        pytest.skip("this system has no mount command")

    def mount_at(source: Path, point: Path) -> None:
        completed = subprocess.run(
            [mount, "--bind", source, point], capture_output=True, text=True, check=False
        )
        if completed.returncode:
            pytest.skip(f"this process may not mount: {completed.stderr.strip()}")
        mount_points.append(point)

    yield mount_at
    for point in reversed(mount_points):
        subprocess.run(["umount", point], check=True)
