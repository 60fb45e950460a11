"""The allocator of Polars is set to one arena before Polars loads, unless the user configured it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VARIABLE = "_RJEM_MALLOC_CONF"


def setting(code: str, configured: str | None) -> str:
    """Return the allocator's setting in a new process that runs the code."""
    inherited = {name: inherited_value for name, inherited_value in os.environ.items() if name != VARIABLE}
    environment = (
        inherited | ({} if configured is None else {VARIABLE: configured}) | {"PYTHONPATH": str(ROOT)}
    )
    code += f"\nimport os, sys; assert 'polars' in sys.modules; print(os.environ['{VARIABLE}'])"
    completed = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return completed.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "module",
    [
        "pipeline.storage.tables",
        pytest.param("assets.definitions, polars", marks=pytest.mark.slow),
        pytest.param("bench.workload", marks=pytest.mark.slow),
    ],
)
def test_the_allocator_has_one_arena_for_every_module_that_loads_polars(module: str) -> None:
    assert setting(f"import {module}", None).endswith("narenas:1")


def test_a_setting_of_the_user_is_unchanged() -> None:
    assert setting("import pipeline.storage.tables", "narenas:3").endswith("narenas:3")
