"""Polars' allocator is told to keep one arena before Polars is loaded, unless something else was said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
VARIABLE = "_RJEM_MALLOC_CONF"


def told(code: str, given: str | None) -> str:
    """What the allocator is told in a new process that runs the code."""
    inherited = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment = inherited | ({} if given is None else {VARIABLE: given}) | {"PYTHONPATH": str(ROOT)}
    code += f"\nimport os, sys; assert 'polars' in sys.modules; print(os.environ['{VARIABLE}'])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "module", ["pipeline.storage.tables", "assets.definitions, polars", "bench.workload"]
)
def test_the_allocator_has_one_arena_whichever_module_loads_polars(module: str) -> None:
    assert told(f"import {module}", None).endswith("narenas:1")


def test_what_is_set_already_stays() -> None:
    assert told("import pipeline.storage.tables", "narenas:3").endswith("narenas:3")
