"""The modules that an encoding process imports, and the entries that it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.encoding.jobs import JOBS_FILE
from pipeline.processes.launch import Meanwhile, launch_environment
from pipeline.recipe import AccelerateSettings
from pipeline.text_embeddings.stage import cache_text
from pipeline.vae_latents.stage import cache_latents

PROCESS = """
import json, sys
from pathlib import Path
from importlib import import_module

import_module(f"{sys.argv[1]}.__main__").main(Path(sys.argv[2]))
print(json.dumps(sorted(sys.modules)))
"""


class RecordingLaunch:
    """A launch of one separate process that records the modules it imported."""

    def __init__(self) -> None:
        self.modules: set[str] = set()

    def __call__(self, module: str, order: Path, meanwhile: Meanwhile) -> None:
        command = [sys.executable, "-c", PROCESS, module, str(order)]
        environment = launch_environment(AccelerateSettings(), order.parent / "error.json")
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert not (order.parent / JOBS_FILE).exists()
            meanwhile()
            output, _ = process.communicate()
        assert process.returncode == 0
        self.modules = set(json.loads(output.splitlines()[-1]))


FORBIDDEN_MODULES = {"polars", "dagster", "pandera"}


@pytest.mark.parametrize("stage", [cache_latents, cache_text], ids=["latents", "text"])
def test_an_encoding_process_imports_no_orchestration_and_writes_the_same_bytes(
    cache: Any, entry_bytes: Any, launch_here: Any, stage: Any
) -> None:
    rows = cache.buckets() if stage is cache_latents else cache.captions()
    launch = RecordingLaunch()
    stage(cache.recipe, rows, cache.tables, launch=launch, log=str)
    assert not FORBIDDEN_MODULES & launch.modules
    alone = entry_bytes()
    for path in cache.recipe.cache_dir.rglob("*.safetensors"):
        path.unlink()
    stage(cache.recipe, rows, cache.tables, launch=launch_here, log=str)
    assert entry_bytes() == alone, "the bytes do not depend on what else the process has imported"
