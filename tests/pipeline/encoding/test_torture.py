"""Killed, raced and spread over processes: what is in the store is right at every moment."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from pipeline.aspect_buckets.stage import assign_buckets
from pipeline.cache.requests import RecipeEntries
from pipeline.encoding.worker.run import WRITES_BEHIND
from pipeline.errors import LaunchError
from pipeline.processes.launch import LocalLaunch, Meanwhile
from pipeline.raw_images.stage import scan
from pipeline.recipe import Recipe
from pipeline.storage.tables import Tables
from pipeline.vae_latents.stage import cache_latents
from pipeline.validated_dataset.stage import validate
from tests.pipeline.encoding.forked import Forked, ForkedLaunch

SIZES = ((64, 64), (48, 80), (80, 48), (200, 150))


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forked]:
    with Forked(tmp_path_factory.mktemp("forked")) as process:
        yield process


def many(cache: Any, count: int) -> Any:
    """`count` pictures of several shapes in place of the photographs."""
    for path in cache.photos.iterdir():
        path.unlink()
    for index in range(count):
        height, width = SIZES[index % len(SIZES)]
        levels = np.random.default_rng(index).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(levels).save(cache.photos / f"{index:03}.png")
        (cache.photos / f"{index:03}.txt").write_text(f"picture {index % 7}", encoding="utf-8")
    return cache


def wanted_specs(recipe: Recipe, buckets: pl.DataFrame) -> dict[str, Any]:
    entries = RecipeEntries(recipe)
    return {(spec := entries.latent_spec(row)).key: spec for row in buckets.to_dicts()}


def visible(recipe: Recipe) -> set[str]:
    return {path.stem for path in recipe.cache_dir.rglob("*.safetensors")}


@pytest.mark.parametrize("kills", [5, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_L06_killed_at_random_moments_nothing_torn_is_seen_and_nothing_finished_is_made_twice(
    cache: Any, forked: Forked, launch_here: Any, entry_bytes: Any, kills: int
) -> None:
    cache = many(cache, 32)
    recipe, buckets = cache.recipe, cache.buckets()
    specs = wanted_specs(recipe, buckets)
    store = RecipeEntries(recipe).store

    def run(launch: Any) -> None:
        cache_latents(recipe, buckets, cache.tables, launch=launch, log=str)

    run(launch_here)
    undisturbed = entry_bytes()
    shutil.rmtree(recipe.cache_dir)
    started_s = time.perf_counter()
    run(ForkedLaunch(forked))
    whole_s = time.perf_counter() - started_s
    assert entry_bytes() == undisturbed

    moments = random.Random(6)
    done, rounds = 0, 0
    in_the_middle = 0
    while done < kills:
        shutil.rmtree(recipe.cache_dir)
        encoded: Counter[str] = Counter()
        killed_here = 0
        while True:
            before = visible(recipe)
            launch = ForkedLaunch(forked, kill_after_s=moments.uniform(0, whole_s) if done < kills else None)
            try:
                run(launch)
            except LaunchError:
                done += 1
                killed_here += 1
            assert not before & set(launch.encoded), "an entry that was there is encoded again"
            encoded.update(launch.encoded)
            now = visible(recipe)
            in_the_middle += 0 < len(now - before) < len(specs) - len(before)
            assert launch.ended <= now, "a result without its entry"
            for key in now:
                assert store.check(specs[key]).valid, key
            if now == specs.keys():
                break
        rounds += 1
        assert entry_bytes() == undisturbed
        twice = sum(encoded.values()) - len(specs)
        assert 0 <= twice <= killed_here * (WRITES_BEHIND + 1), "more than the entries in flight were lost"
    assert in_the_middle >= kills // 8, f"{in_the_middle} of {kills} kills came while entries were appearing"


@pytest.mark.parametrize("num_jobs", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_L10_several_jobs_at_once_on_an_empty_cache_each_end_whole(
    cache: Any, forked: Forked, tmp_path: Path, entry_bytes: Any, launch_here: Any, num_jobs: int
) -> None:
    cache = many(cache, 30)
    alone = cache_latents(cache.recipe, cache.buckets(), cache.tables, launch=launch_here, log=str)
    lone = {name: data for name, data in entry_bytes().items() if name.startswith("latents")}
    shutil.rmtree(cache.recipe.cache_dir)
    tasks: list[dict[str, Any]] = []
    for job in range(num_jobs):
        recipe = cache.recipe.model_copy(update={"output_dir": tmp_path / f"job{job}"})
        prepare(recipe)
        file = tmp_path / f"job{job}.json"
        file.write_text(recipe.model_dump_json(), encoding="utf-8")
        tasks.append({"kind": "stages", "recipe": str(file)})
    assert forked.run(tasks) == [0] * num_jobs

    found = entry_bytes()
    assert {name: data for name, data in found.items() if name.startswith("latents")} == lone
    assert not list(cache.recipe.cache_dir.rglob("*.tmp"))
    tables = [Tables(tmp_path / f"job{job}") for job in range(num_jobs)]
    for own in tables:
        assert own.read("vae_latents")["key"].to_list() == alone.table["key"].to_list()
        assert len(own.read("text_embeddings")) == 30
    for asset, wanted in (("vae_latents", len(lone)), ("text_embeddings", len(found) - len(lone))):
        reports = [
            json.loads((tmp_path / f"job{job}" / f"{asset}.json").read_text()) for job in range(num_jobs)
        ]
        assert sum(report["encoded"] for report in reports) == wanted, "each entry is put in place once"
        assert all(report["encoded"] + report["reused"] == wanted for report in reports)


def prepare(recipe: Recipe) -> None:
    """The tables that the cache stages read."""
    tables = Tables(recipe.output_dir)
    raw = scan(recipe, tables, log=str)
    validated = validate(recipe, raw.table, tables, log=str)
    tables.write("validated_dataset", validated.table)
    tables.write("aspect_buckets", assign_buckets(recipe, validated.table, log=str).table)


@pytest.mark.parametrize(
    ("samples", "ranks"), [(2, 3), pytest.param(25, 8, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_L10_few_samples_on_many_ranks_are_each_made_once(
    cache: Any, launch_here: Any, entry_bytes: Any, samples: int, ranks: int
) -> None:
    """By accelerate's own launcher, as a recipe with `accelerate.num_processes` does it."""
    cache = many(cache, samples)
    cache_latents(cache.recipe, cache.buckets(), cache.tables, launch=launch_here, log=str)
    lone = entry_bytes()
    shutil.rmtree(cache.recipe.cache_dir)
    spread = cache.with_settings(accelerate={"num_processes": ranks})
    launch = SpreadLaunch(spread.recipe)
    result = cache_latents(spread.recipe, spread.buckets(), spread.tables, launch=launch, log=str)
    assert entry_bytes() == lone
    assert result.report["encoded"] == samples
    made = [key for keys in launch.made.values() for key in keys]
    assert sorted(made) == sorted(result.table["key"])
    assert sorted(launch.made) == list(range(ranks)), "a rank has left no results"
    assert max(map(len, launch.made.values())) <= -(-samples // ranks) + 1, (
        "one rank has much more than its share"
    )


class SpreadLaunch:
    """accelerate's launch, and what each rank said it made; kills a rank on its first result if asked to."""

    def __init__(self, recipe: Recipe, victim: int | None = None) -> None:
        self._launch = LocalLaunch(recipe.accelerate)
        self._victim = victim
        self.made: dict[int, list[str]] = {}

    def __call__(self, module: str, order: Path, meanwhile: Meanwhile) -> None:
        with ThreadPoolExecutor(1) as pool:
            killed = pool.submit(self._kill, order) if self._victim is not None else None
            try:
                self._launch(module, order, meanwhile)
            finally:
                for path in order.parent.glob("results-*.jsonl"):
                    lines = [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()]
                    rank = int(path.stem.removeprefix("results-"))
                    self.made[rank] = [line["key"] for line in lines if line.get("outcome") == "made"]
                if killed is not None:
                    killed.result()

    def _kill(self, order: Path) -> None:
        results = order.parent / f"results-{self._victim}.jsonl"
        until_s = time.monotonic() + 100
        while not (results.is_file() and results.stat().st_size):
            assert time.monotonic() < until_s, "the rank has made nothing"
            time.sleep(0.002)
        for process in psutil.process_iter():
            if str(order) in process.cmdline() and process.environ().get("RANK") == str(self._victim):
                process.kill()
                return
        raise AssertionError("there is no such rank")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_L08_a_rank_that_dies_fails_the_step_and_loses_only_what_was_in_flight(
    cache: Any, launch_here: Any, entry_bytes: Any
) -> None:
    cache = many(cache, 150)
    cache_latents(cache.recipe, cache.buckets(), cache.tables, launch=launch_here, log=str)
    lone = entry_bytes()
    shutil.rmtree(cache.recipe.cache_dir)
    spread = cache.with_settings(accelerate={"num_processes": 3})
    buckets = spread.buckets()
    launch = SpreadLaunch(spread.recipe, victim=1)
    with pytest.raises(LaunchError, match=r"exit status|signal"):
        cache_latents(spread.recipe, buckets, spread.tables, launch=launch, log=str)
    assert not [p for p in psutil.process_iter() if ".worker" in " ".join(p.cmdline())]
    survived = entry_bytes()
    assert 0 < len(survived) < 150
    assert survived.items() <= lone.items()
    resumed = cache_latents(spread.recipe, buckets, spread.tables, launch=launch_here, log=str)
    assert resumed.report["encoded"] == 150 - len(survived)
    assert entry_bytes() == lone


FATES = ("kept", "vanished", "changed", "cut", "a folder", "no image")


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fates=st.lists(st.sampled_from(FATES), min_size=5, max_size=5))
def test_L02_whichever_samples_fail_the_others_get_their_own_latents(
    cache: Any, launch_here: Any, fates: list[str]
) -> None:
    """Each remaining entry equals, byte for byte, that of its image encoded alone."""
    alone = encoded_alone(cache, launch_here)
    shutil.rmtree(cache.recipe.cache_dir)
    buckets = cache.buckets()
    paths = [cache.photos / name for name in buckets["path"]]
    before = {path: path.read_bytes() for path in paths}
    try:
        for path, fate in zip(paths, fates, strict=True):
            suffer(path, fate)
        result = cache_latents(cache.recipe, buckets, cache.tables, launch=launch_here, log=str)
    finally:
        for path, data in before.items():
            if path.is_dir():
                path.rmdir()
            path.write_bytes(data)
    kept = [name for name, fate in zip(buckets["sample_id"], fates, strict=True) if fate == "kept"]
    assert result.table["sample_id"].to_list() == kept
    assert sorted(result.rejected["sample_id"]) == sorted(set(buckets["sample_id"]) - set(kept))
    store = RecipeEntries(cache.recipe).store
    for row in result.table.to_dicts():
        spec = RecipeEntries(cache.recipe).latent_spec(row)
        assert store.path(spec).read_bytes() == alone[row["sample_id"]]
    assert visible(cache.recipe) == set(result.table["key"])


def suffer(path: Path, fate: str) -> None:
    if fate in ("vanished", "a folder"):
        path.unlink()
    if fate == "a folder":
        path.mkdir()
    if fate == "changed":
        Image.new("RGB", (70, 70), "red").save(path)
    if fate == "cut":
        path.write_bytes(path.read_bytes()[:-300])
    if fate == "no image":
        path.write_text("not an image")


def encoded_alone(cache: Any, launch: Any) -> dict[str, bytes]:
    """Each sample's entry from a run that has no other."""
    alone: dict[str, bytes] = {}
    for row in cache.buckets().iter_slices(1):
        result = cache_latents(cache.recipe, row, cache.tables, launch=launch, log=str)
        (made,) = result.table.to_dicts()
        spec = RecipeEntries(cache.recipe).latent_spec(made)
        alone[made["sample_id"]] = RecipeEntries(cache.recipe).store.path(spec).read_bytes()
    return alone
