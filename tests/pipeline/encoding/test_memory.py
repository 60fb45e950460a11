"""Peak memory of a real encoding process and of planning, for small and large numbers of jobs."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.cache.requests import RecipeEntries
from pipeline.cache.store import Kind
from pipeline.encoding.jobs import Job, Order, read_results, write_order
from pipeline.processes.launch import launch_environment
from pipeline.recipe import AccelerateSettings

PROCESS = """
import sys
from pathlib import Path
from pipeline.vae_latents.worker.__main__ import main

main(Path(sys.argv[1]))
print(Path("/proc/self/status").read_text())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from Linux's /proc")
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("counts", [(20, 200), (1_000, 10_000)])
@pytest.mark.parametrize("kind", ["latents", "text"])
def test_L12_peak_memory_does_not_depend_on_the_number_of_jobs(
    cache: Any, tmp_path: Path, kind: Kind, counts: tuple[int, int]
) -> None:
    few, many = (peak_rss_bytes(order_of(cache, kind, count), tmp_path / str(count)) for count in counts)
    sys.stdout.write(
        f"{kind}: {few / 2**20:.0f} MiB for {counts[0]}, {many / 2**20:.0f} MiB for {counts[1]}\n"
    )
    assert many < 1.1 * few


def order_of(cache: Any, kind: Kind, count: int) -> Order:
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
    settings = {"compute_dtype": "float32", "posterior": "sample", "background": [255, 255, 255]}
    return Order(kind, entries.model_folder, cache.recipe.cache_dir / str(count), settings, jobs)


def peak_rss_bytes(order: Order, folder: Path) -> int:
    """Return the peak memory of a process that runs the order; every job must succeed.

    The process reads its own VmHWM, because the `ru_maxrss` its parent receives includes the parent's own.
    """
    folder.mkdir()
    command = [sys.executable, "-c", PROCESS, str(write_order(order, folder))]
    process = subprocess.run(
        command,
        env=launch_environment(AccelerateSettings(), folder / "error.json"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert len(read_results(folder).made) == len(order.jobs)
    return int(process.stdout.split("VmHWM:")[1].split()[0]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize(
    "counts", [(1_000, 16_000), pytest.param((10_000, 100_000), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("kind", ["latents", "text"])
def test_L12_planning_a_cold_cache_takes_less_than_one_kilobyte_per_sample(
    tiny_sd: Path, tmp_path: Path, kind: Kind, counts: tuple[int, int]
) -> None:
    few, many = (peak_of_planning(tiny_sd, tmp_path / str(count), kind, count) for count in counts)
    bytes_per_sample = (many - few) / (counts[1] - counts[0])
    sys.stdout.write(
        f"{kind}: {bytes_per_sample:.0f} bytes per sample, {many / 2**20:.0f} MiB for {counts[1]}\n"
    )
    assert bytes_per_sample < 1000


def peak_of_planning(base: Path, folder: Path, kind: Kind, count: int) -> int:
    command = [sys.executable, "-m", "tests.pipeline.encoding.planned"]
    command += [str(base), str(folder), kind, str(count)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    return int(process.stdout)
