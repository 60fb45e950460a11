"""Whole commands, compared with one plain process that does the same work: what a user waits for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from bench import bare
from bench.growth.stages import prepare
from bench.measure import Figure, Sides, Workplace
from bench.workload import photographs
from demo.tiny_models import make_tiny
from pipeline.cache.entry_format import KINDS

ROOT = Path(__file__).parents[2]

EDGE = 256
RANK = 16
BATCH_SIZE = 4

RECIPE = """\
datasets: [{{name: photos, path: {folder}/photos}}]
cache_dir: {cache}
output_dir: {folder}/out
model: {{base: {folder}/tiny}}
buckets: {{resolution: {edge}, step: {step}}}
training:
  steps: 100
  batch_size: {batch_size}
  seed: {seed}
  sample_every: 0
  lora: {{rank: {rank}, alpha: {rank}}}
"""


def _start(place: Workplace, *options: str) -> subprocess.Popen[bytes]:
    (place.folder / "home").mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "LATENTLINE_CONFIGS": str(place.folder / "configs"),
        "DAGSTER_HOME": str(place.folder / "home"),
        "DAGSTER_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
    }
    command = [str(Path(sys.executable).with_name("latentline")), "run", "bench", *options]
    with (place.folder / "command.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log)


def _finish(place: Workplace, process: subprocess.Popen[bytes]) -> None:
    if process.wait():
        raise RuntimeError((place.folder / "command.log").read_text(encoding="utf-8"))


def _bare_s(*arguments: object) -> float:
    """Run bench/bare.py with the settings of a plain process, and return its seconds."""
    start_s = time.perf_counter()
    subprocess.run(bare.command(*arguments), check=True, capture_output=True)
    return time.perf_counter() - start_s


def _write_recipe(place: Workplace, cache: Path, *, edge: int, step: int, seed: int = 0) -> None:
    (place.folder / "configs").mkdir(exist_ok=True)
    text = RECIPE.format(
        folder=place.folder,
        cache=cache,
        edge=edge,
        step=step,
        batch_size=BATCH_SIZE,
        rank=RANK,
        seed=seed,
    )
    (place.folder / "configs" / "bench.yaml").write_text(text, encoding="utf-8")


@contextmanager
def _cold(place: Workplace) -> Generator[Sides]:
    images = 200 if place.full else 60
    cache, encoded = place.folder / "cache", place.folder / "bare"
    make_tiny(place.folder / "tiny")
    photographs(place.folder / "photos", images, max_px=4_000_000)
    _write_recipe(place, cache, edge=EDGE, step=64)

    def ours() -> float:
        # The hash of the weights stays: it is computed once per model.
        for folder in (place.folder / "out", *(cache / kind for kind in KINDS)):
            shutil.rmtree(folder, ignore_errors=True)
        start_s = time.perf_counter()
        _finish(place, _start(place, "--cache-only"))
        return time.perf_counter() - start_s

    def limit() -> float:
        shutil.rmtree(encoded, ignore_errors=True)
        return _bare_s("encode", place.folder / "tiny", place.folder / "photos", encoded, EDGE)

    yield Sides(1, ours, limit)


@contextmanager
def _first_step(place: Workplace) -> Generator[Sides]:
    prepare({place.folder: 5000 if place.full else 1000})
    cache, seeds = place.folder / "project" / "cache", count()
    _write_recipe(place, cache, edge=64, step=8)
    _finish(place, _start(place, "--cache-only"))

    def ours() -> float:
        _write_recipe(place, cache, edge=64, step=8, seed=next(seeds))  # another seed is another run
        known = set((place.folder / "out").glob("runs/*"))
        start_s = time.perf_counter()
        process = _start(place)
        while not any(_has_step(run) for run in (place.folder / "out").glob("runs/*") if run not in known):
            if process.poll() is not None:
                _finish(place, process)
                raise RuntimeError("the run logged no step")
            time.sleep(0.02)
        taken_s = time.perf_counter() - start_s
        process.terminate()
        process.wait()
        return taken_s

    def limit() -> float:
        return _bare_s("step", place.folder / "tiny", cache, RANK, BATCH_SIZE)

    yield Sides(1, ours, limit)


def _has_step(run: Path) -> bool:
    metrics = run / "logs" / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


FIGURES = [
    Figure(
        "command: cold caches",
        "commands",
        "`latentline run --cache-only` with empty caches",
        "a plain process that imports torch, loads both models, encodes the same images and captions, and "
        "writes them",
        1.25,
        _cold,
    ),
    Figure(
        "command: first step",
        "commands",
        "`latentline run` with full caches, until the first step is logged",
        "a plain process that loads the denoiser and trains one step on entries of the cache",
        1.6,
        _first_step,
    ),
]
