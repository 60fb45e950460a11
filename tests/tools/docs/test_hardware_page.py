"""docs/hardware.md shows what the forecast gives now."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.configurations import PUBLISHED
from pipeline.recipe import project_root
from tools.docs.hardware_page import LARGE_MODELS, PAGE, disk_line, fit_line, memory_line, memory_of


@pytest.fixture
def lines() -> list[str]:
    return (project_root() / PAGE).read_text(encoding="utf-8").splitlines()


def test_the_memory_of_a_model_is_up_to_date(lines: list[str], tmp_path: Path) -> None:
    name = "Stable Diffusion 1.5"
    memory = memory_of(next(each for each in PUBLISHED if each.name == name), tmp_path)
    assert fit_line(name, memory) in lines, "run python -m tools.docs.hardware_page"
    assert memory_line(name, memory) in lines, "run python -m tools.docs.hardware_page"


def test_the_disk_space_of_all_models_is_up_to_date(lines: list[str], tmp_path: Path) -> None:
    for number, published in enumerate(PUBLISHED):
        folder = tmp_path / str(number)
        assert disk_line(published, folder) in lines, "run python -m tools.docs.hardware_page"


def test_every_model_is_in_the_tables_of_memory_and_disk_space_and_large_models_in_that_of_proposals(
    lines: list[str],
) -> None:
    tables = {"cards": PUBLISHED, "memory": PUBLISHED, "disk": PUBLISHED}
    names = {name: [each.name for each in models] for name, models in tables.items()}
    names["proposals"] = [each.name for each in PUBLISHED if each.name in LARGE_MODELS]
    for table, expected in names.items():
        begin, end = (lines.index(f"<!-- {table}: {edge} -->") for edge in ("begin", "end"))
        assert [line.split("|")[1].strip() for line in lines[begin + 4 : end - 1]] == expected, table


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_complete_page_is_up_to_date() -> None:
    """In a process that compiles nothing, which the text encoder of Kolors needs on the meta device."""
    code = (
        "from tools.docs.hardware_page import LARGE_MODELS, PAGE, complete_page\n"
        "page = PAGE.read_text(encoding='utf-8')\n"
        "raise SystemExit(complete_page(page) != page)\n"
    )
    environment = {**os.environ, "PYTORCH_JIT": "0", "PYTHONPATH": str(project_root())}
    status = subprocess.run([sys.executable, "-c", code], cwd=project_root(), env=environment, check=False)
    assert status.returncode == 0, "run python -m tools.docs.hardware_page"
