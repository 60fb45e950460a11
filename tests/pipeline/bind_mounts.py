"""A fixture that makes bind mounts."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def bind() -> Iterator[Callable[[Path, Path], None]]:
    """Return a function that makes its first folder visible at its second until the test ends."""
    made: list[Path] = []
    mount = shutil.which("mount")
    if mount is None:
        pytest.skip("this system has no mount command")

    def make(source: Path, point: Path) -> None:
        done = subprocess.run([mount, "--bind", source, point], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"this process may not mount: {done.stderr.strip()}")
        made.append(point)

    yield make
    for point in reversed(made):
        subprocess.run(["umount", point], check=True)
