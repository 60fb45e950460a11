"""Start-up: loading definitions, and a job with nothing to do, compared with an empty Dagster project."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from bench.measure import Figure, Sides, Workplace, timed
from bench.workload import photographs
from demo.tiny_models import make_tiny

EMPTY = """\
from dagster import AssetExecutionContext, Definitions, asset, define_asset_job, in_process_executor

@asset
def nothing() -> None:
    pass

defs = Definitions([nothing], jobs=[define_asset_job("job", [nothing])], executor=in_process_executor)
"""
"""Smallest Dagster project, whose start-up is the minimum for any project."""

NUM_RECIPES = 50

RECIPE = """\
datasets: [{{name: photos, path: {folder}/photos}}]
cache_dir: {folder}/cache
output_dir: {folder}/out
model: {{base: {folder}/tiny}}
buckets: {{resolution: 64, step: 8}}
"""


def _runner(place: Workplace, configs: str = "configs") -> Callable[..., None]:
    root = str(Path(__file__).parents[2])
    environment = {
        **os.environ,
        "LATENTLINE_CONFIGS": str(place.folder / configs),
        "PYTHONPATH": os.pathsep.join([root, str(place.folder / "empty")]),
        "DAGSTER_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
    }

    def run(*arguments: str) -> None:
        command = [sys.executable, "-m", "dagster", *arguments]
        subprocess.run(command, env=environment, cwd=place.folder, check=True, capture_output=True)

    return run


def _prepared(place: Workplace) -> Callable[..., None]:
    (place.folder / "empty").mkdir()
    (place.folder / "empty" / "empty_project.py").write_text(EMPTY, encoding="utf-8")
    (place.folder / "configs").mkdir()
    recipe = RECIPE.format(folder=place.folder)
    (place.folder / "configs" / "bench.yaml").write_text(recipe, encoding="utf-8")
    return _runner(place)


@contextmanager
def _definitions(place: Workplace) -> Generator[Sides]:
    run = _prepared(place)

    def validate(module: str) -> Callable[[], None]:
        return lambda: run("definitions", "validate", "-m", module)

    yield Sides(1, timed(validate("assets.definitions")), timed(validate("empty_project")))


@contextmanager
def _warm_job(place: Workplace) -> Generator[Sides]:
    run = _prepared(place)
    photographs(place.folder / "photos", 24, max_px=300_000)
    make_tiny(place.folder / "tiny")

    def execute(module: str, job: str) -> Callable[[], None]:
        return lambda: run("job", "execute", "-m", module, "-j", job)

    execute("assets.definitions", "bench_cache")()
    yield Sides(
        1, timed(execute("assets.definitions", "bench_cache")), timed(execute("empty_project", "job"))
    )


@contextmanager
def _many_recipes(place: Workplace) -> Generator[Sides]:
    run, many = _prepared(place), _with_many(place)
    arguments = ("definitions", "validate", "-m", "assets.definitions")
    yield Sides(1, timed(lambda: many(*arguments)), timed(lambda: run(*arguments)))


@contextmanager
def _one_job_of_many(place: Workplace) -> Generator[Sides]:
    run, many = _prepared(place), _with_many(place)
    photographs(place.folder / "photos", 24, max_px=300_000)
    make_tiny(place.folder / "tiny")
    arguments = ("job", "execute", "-m", "assets.definitions", "-j", "bench_cache")
    run(*arguments)
    yield Sides(1, timed(lambda: many(*arguments)), timed(lambda: run(*arguments)))


def _with_many(place: Workplace) -> Callable[..., None]:
    """Return a function that runs a command with `NUM_RECIPES` recipes, including that of `_prepared`."""
    folder = place.folder / "many"
    shutil.copytree(place.folder / "configs", folder)
    for number in range(1, NUM_RECIPES):
        recipe = RECIPE.format(folder=place.folder).replace("/out\n", f"/out{number}\n")
        (folder / f"bench{number}.yaml").write_text(recipe, encoding="utf-8")
    return _runner(place, configs="many")


FIGURES = [
    Figure(
        "start: definitions",
        "commands",
        "`dagster definitions validate`",
        "the same for a project with one empty asset",
        None,
        _definitions,
    ),
    Figure(
        "start: recipes",
        "commands",
        f"`dagster definitions validate` with {NUM_RECIPES} recipes",
        "the same with one recipe",
        3.0,
        _many_recipes,
    ),
    Figure(
        "start: one of many",
        "commands",
        f"cache job without changes, with {NUM_RECIPES} recipes",
        "the same with one recipe",
        3.0,
        _one_job_of_many,
    ),
    Figure(
        "start: warm job",
        "commands",
        "cache job without changes",
        "job with one empty asset",
        None,
        _warm_job,
    ),
]
