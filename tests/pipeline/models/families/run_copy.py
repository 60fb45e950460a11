"""Run tests in a copy of the sources, in a process that has not imported any of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

OUTPUT_FILE = "output.txt"
"""File in the copy with the output of the tests."""


def run_tests(sources: Path, arguments: list[str]) -> None:
    """Run pytest on a copy of the sources and exit with its status."""
    with (sources / OUTPUT_FILE).open("w", encoding="utf-8") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    os.chdir(sources)
    os.environ.pop("PYTEST_XDIST_WORKER", None)
    os.environ["PYTHONPATH"] = str(sources)
    sys.path.insert(0, str(sources))
    sys.exit(pytest.main(arguments))
