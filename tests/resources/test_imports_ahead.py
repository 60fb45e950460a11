"""A run imports ahead for the processes that it will surely launch, and for no others."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.encoding.workers import WORKERS
from pipeline.processes.launch import TRAINING_MODULE
from resources.imports_ahead import imports_ahead
from tests.small_recipe import small_recipe

LATENTS, TEXT = WORKERS["latents"], WORKERS["text"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")


def imported(root: Path, assets: Sequence[str], **sections: Any) -> list[str]:
    """Return the entry modules whose libraries a process imports in the context."""
    recipe = small_recipe(root, **{"accelerate": {"num_processes": 1}, **sections})
    before = set(psutil.Process().children())
    with imports_ahead(recipe, assets):
        started = [each.cmdline() for each in psutil.Process().children() if each not in before]
    assert set(psutil.Process().children()) <= before, "no process remains"
    return [module for command in started for module in command[3:]]


def test_the_modules_of_the_assets_that_a_run_executes(tmp_path: Path) -> None:
    assert imported(tmp_path, ["raw_images", "vae_latents", "trained_lora"]) == [LATENTS, TRAINING_MODULE]
    (tmp_path / "cache" / "latents").mkdir(parents=True)
    assert imported(tmp_path, ["vae_latents", "text_embeddings"]) == [TEXT]
    assert imported(tmp_path, ["raw_images", "vae_latents"]) == []


def test_nothing_for_processes_of_accelerates_launcher(tmp_path: Path) -> None:
    assert imported(tmp_path, ["vae_latents"], accelerate={"num_processes": 2}) == []


def test_nothing_for_other_executors_and_launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "deployment.yaml"
    monkeypatch.setenv("LATENTLINE_DEPLOYMENT", str(file))
    file.write_text("executor: multiprocess\n", encoding="utf-8")
    assert imported(tmp_path, ["vae_latents"]) == []
