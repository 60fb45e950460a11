"""An encoding process: the modules it imports, the entries it writes, and its peak memory."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cache.store import Kind
from pipeline.encoding.jobs import JOBS_FILE, Encoding, Job, read_results, write_encoding
from pipeline.processes.launch import Meanwhile, launch_environment
from pipeline.recipe import AccelerateSettings
from pipeline.text_embeddings.stage import cache_text, text_settings
from pipeline.vae_latents.stage import cache_latents

PROCESS = """
import json, sys
from pathlib import Path
from importlib import import_module

from pipeline.encoding.worker.main import main

main(Path(sys.argv[2]), import_module(f"{sys.argv[1]}.__main__").run)
print(json.dumps(sorted(sys.modules)))
"""


class RecordingLaunch:
    """A launch of one separate process that records the modules it imported."""

    def __init__(self) -> None:
        self.modules: set[str] = set()

    def __call__(self, module: str, encoding: Path, meanwhile: Meanwhile) -> None:
        command = [sys.executable, "-c", PROCESS, module, str(encoding)]
        environment = launch_environment(AccelerateSettings(), encoding.parent / "error.json")
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert not (encoding.parent / JOBS_FILE).exists()
            meanwhile()
            output, _ = process.communicate()
        assert process.returncode == 0
        self.modules = set(json.loads(output.splitlines()[-1]))


FORBIDDEN_MODULES = {"polars", "dagster", "pandera"}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [cache_latents, cache_text], ids=["latents", "text"])
def test_an_encoding_process_imports_no_orchestration_and_writes_the_same_bytes(
    cache: Any, entry_bytes: Any, in_process_launch: Any, stage: Any
) -> None:
    rows = cache.buckets() if stage is cache_latents else cache.captions()
    launch = RecordingLaunch()
    stage(cache.recipe, rows, cache.tables, launch=launch, log=str)
    assert not FORBIDDEN_MODULES & launch.modules
    separate_bytes = entry_bytes()
    for path in cache.recipe.cache_dir.rglob("*.safetensors"):
        path.unlink()
    stage(cache.recipe, rows, cache.tables, launch=in_process_launch, log=str)
    assert entry_bytes() == separate_bytes, "the bytes do not depend on what else the process has imported"


MEMORY_PROCESS = """
import sys
from pathlib import Path
from pipeline.encoding.worker.main import main
from pipeline.{stage}.worker.__main__ import run

main(Path(sys.argv[1]), run)
print(Path("/proc/self/status").read_text())
"""
STAGES: dict[Kind, str] = {"latents": "vae_latents", "text": "text_embeddings"}


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from Linux's /proc")
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("counts", [(20, 200), (1_000, 10_000)], ids=str)
@pytest.mark.parametrize("kind", ["latents", "text"])
def test_L12_peak_memory_does_not_depend_on_the_number_of_jobs(
    cache: Any, tmp_path: Path, kind: Kind, counts: tuple[int, int]
) -> None:
    few, many = (peak_rss_bytes(encoding_of(cache, kind, count), tmp_path / str(count)) for count in counts)
    sys.stdout.write(
        f"{kind}: {few / 2**20:.0f} MiB for {counts[0]}, {many / 2**20:.0f} MiB for {counts[1]}\n"
    )
    assert many < 1.1 * few


def encoding_of(cache: Any, kind: Kind, count: int) -> Encoding:
    """Return `count` jobs that repeat a few images or captions under distinct keys."""
    entries, jobs = RecipeEntries(cache.recipe), list[Job]()
    rows = cache.buckets().to_dicts()
    for number in range(count):
        row = rows[number % len(rows)]
        if kind == "latents":
            spec, work = (
                entries.latent_spec(row),
                {**row, "root": str(cache.photos), "flipped": False},
            )
            facts = {"inputs": dict(vars(entries.latent_inputs(row)))}
        else:
            spec, work = entries.text_spec(row["path"]), {"caption": f"picture {number}"}
            facts = {"inputs": dict(vars(entries.text_inputs(row["path"])))}
        spec = replace(spec, key=hashlib.sha256(b"%d" % number).hexdigest())
        jobs.append(Job(spec, facts, work, f"{row['sample_id']}-{number:06}", 4096))
    settings: dict[str, Any] = text_settings(cache.recipe)
    if kind == "latents":
        settings = {"compute_dtype": "float32", "posterior": "sample", "background": [255, 255, 255]}
    return Encoding(kind, entries.model_folder, cache.recipe.cache_dir / str(count), settings, jobs)


def peak_rss_bytes(encoding: Encoding, folder: Path) -> int:
    """Return the peak memory of a process that runs the encoding; every job must succeed.

    The process reads its own VmHWM, because the `ru_maxrss` its parent receives includes the parent's own.
    """
    folder.mkdir()
    script = MEMORY_PROCESS.format(stage=STAGES[encoding.kind])
    command = [sys.executable, "-c", script, str(write_encoding(encoding, folder))]
    process = subprocess.run(
        command,
        env=launch_environment(AccelerateSettings(), folder / "error.json"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert len(read_results(folder).made) == len(encoding.jobs)
    return int(process.stdout.split("VmHWM:")[1].split()[0]) * 1024
