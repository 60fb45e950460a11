"""Filling the cache: killed, concurrent and distributed jobs, a full disk, and the memory of planning."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pipeline.aspect_buckets.stage import assign_buckets
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cache.store import Kind
from pipeline.encoding.worker.run import WRITES_BEHIND
from pipeline.encoding.workers import WORKERS, surely_launched
from pipeline.errors import LaunchError
from pipeline.processes.launch import LocalLaunch, Meanwhile
from pipeline.raw_images.stage import scan
from pipeline.recipe import Recipe
from pipeline.storage.tables import Tables
from pipeline.vae_latents.stage import cache_latents
from pipeline.validated_dataset.stage import validate
from tests.pipeline.encoding.fork_server import ForkedLaunch, ForkServer
from tests.pipeline.namespaces import namespace
from tests.small_recipe import small_recipe

SIZES = ((64, 64), (48, 80), (80, 48), (200, 150))


@pytest.fixture(scope="module")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with ForkServer(tmp_path_factory.mktemp("forked")) as server:
        yield server


def with_images(cache: Any, count: int) -> Any:
    """Replace the photographs with `count` images of several shapes."""
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


def test_an_encoding_is_certain_for_the_kinds_of_which_a_local_cache_has_no_entry(tmp_path: Path) -> None:
    recipe, latents, text = small_recipe(tmp_path), WORKERS["latents"], WORKERS["text"]
    assert surely_launched(recipe) == [latents, text]
    (recipe.cache_dir / "latents").mkdir(parents=True)
    assert surely_launched(recipe) == [text]
    (recipe.cache_dir / "packs" / "text").mkdir(parents=True)
    assert surely_launched(recipe) == []
    assert surely_launched(small_recipe(tmp_path, cache_dir="memory://cache")) == []


def test_a_wait_before_the_processes_start_counts_as_neither_work_nor_startup(
    cache: Any, in_process_launch: Any
) -> None:
    wait_s = 0.2

    def launch(module: str, encoding: Path, meanwhile: Meanwhile | None = None) -> None:
        time.sleep(wait_s)  # such as the wait for a place in a pool
        in_process_launch(module, encoding, meanwhile)

    cache = with_images(cache, 4)
    recipe, buckets = cache.recipe, cache.buckets()
    start_s = time.perf_counter()
    report = cache_latents(recipe, buckets, cache.tables, launch=launch, log=str).report
    total_s = time.perf_counter() - start_s
    counted_s = report["seconds"] + report["startup_seconds"] + report["pictures_seconds"]
    rounding_s = 0.002
    assert counted_s <= total_s - wait_s + rounding_s


@pytest.mark.parametrize("kills", [5, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_L06_jobs_killed_at_random_moments_leave_only_valid_entries_and_never_encode_a_finished_one_again(
    cache: Any, fork_server: ForkServer, in_process_launch: Any, entry_bytes: Any, kills: int
) -> None:
    cache = with_images(cache, 32 if kills > 5 else 16)
    recipe, buckets = cache.recipe, cache.buckets()
    specs = wanted_specs(recipe, buckets)
    store = RecipeEntries(recipe).store

    def run(launch: Any) -> None:
        cache_latents(recipe, buckets, cache.tables, launch=launch, log=str)

    run(in_process_launch)
    undisturbed = entry_bytes()
    shutil.rmtree(recipe.cache_dir)
    started_s = time.perf_counter()
    run(ForkedLaunch(fork_server))
    full_run_s = time.perf_counter() - started_s
    assert entry_bytes() == undisturbed

    moments = random.Random(6)
    num_kills, rounds = 0, 0
    kills_while_writing = 0
    while num_kills < kills:
        shutil.rmtree(recipe.cache_dir)
        encoded: Counter[str] = Counter()
        kills_in_round = 0
        while True:
            before = visible(recipe)
            launch = ForkedLaunch(
                fork_server, kill_after_s=moments.uniform(0, full_run_s) if num_kills < kills else None
            )
            try:
                run(launch)
            except LaunchError:
                num_kills += 1
                kills_in_round += 1
            assert not before & set(launch.encoded), "an existing entry was encoded again"
            encoded.update(launch.encoded)
            now = visible(recipe)
            kills_while_writing += 0 < len(now - before) < len(specs) - len(before)
            assert launch.ended <= now, "a result was recorded without its entry"
            for key in now:
                assert store.check(specs[key]).valid, key
            if now == specs.keys():
                break
        rounds += 1
        assert entry_bytes() == undisturbed
        num_repeated = sum(encoded.values()) - len(specs)
        assert 0 <= num_repeated <= kills_in_round * (WRITES_BEHIND + 1), (
            "more than the entries in flight were lost"
        )
    assert kills_while_writing >= kills // 8, (
        f"{kills_while_writing} of {kills} kills came while entries were appearing"
    )


@pytest.mark.parametrize("num_jobs", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_L10_several_concurrent_jobs_on_an_empty_cache_all_complete(
    cache: Any,
    fork_server: ForkServer,
    tmp_path: Path,
    entry_bytes: Any,
    in_process_launch: Any,
    num_jobs: int,
) -> None:
    cache = with_images(cache, 30)
    expected_alone = cache_latents(
        cache.recipe, cache.buckets(), cache.tables, launch=in_process_launch, log=str
    )
    expected = {name: data for name, data in entry_bytes().items() if name.startswith("latents")}
    shutil.rmtree(cache.recipe.cache_dir)
    tasks: list[dict[str, Any]] = []
    for job in range(num_jobs):
        recipe = cache.recipe.model_copy(update={"output_dir": tmp_path / f"job{job}"})
        prepare(recipe)
        file = tmp_path / f"job{job}.json"
        file.write_text(recipe.model_dump_json(), encoding="utf-8")
        tasks.append({"kind": "stages", "recipe": str(file)})
    assert fork_server.run(tasks) == [0] * num_jobs

    written = entry_bytes()
    assert {name: data for name, data in written.items() if name.startswith("latents")} == expected
    assert not list(cache.recipe.cache_dir.rglob("*.tmp"))
    tables = [Tables(tmp_path / f"job{job}") for job in range(num_jobs)]
    for job_tables in tables:
        assert job_tables.read("vae_latents")["key"].to_list() == expected_alone.table["key"].to_list()
        assert len(job_tables.read("text_embeddings")) == 30
    for asset, num_entries in (
        ("vae_latents", len(expected)),
        ("text_embeddings", len(written) - len(expected)),
    ):
        reports = [
            json.loads((tmp_path / f"job{job}" / f"{asset}.json").read_text()) for job in range(num_jobs)
        ]
        assert sum(report["encoded"] for report in reports) == num_entries, (
            "each entry must be written exactly once"
        )
        in_cache = [report["encoded"] + report["reused"] for report in reports]
        assert in_cache == [num_entries] * num_jobs, f"encoded and reused {asset}, by job"


def prepare(recipe: Recipe) -> None:
    """Write the tables that the cache stages read."""
    tables = Tables(recipe.output_dir)
    raw = scan(recipe, tables, log=str)
    validated = validate(recipe, raw.table, tables, log=str)
    tables.write("validated_dataset", validated.table)
    tables.write("aspect_buckets", assign_buckets(recipe, validated.table, log=str).table)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("samples", "ranks"), [(2, 3), (25, 8)])
def test_L10_few_samples_on_many_ranks_are_each_encoded_once(
    cache: Any, in_process_launch: Any, entry_bytes: Any, samples: int, ranks: int
) -> None:
    """Accelerate launches the ranks, as for a recipe with `accelerate.num_processes`."""
    cache = with_images(cache, samples)
    cache_latents(cache.recipe, cache.buckets(), cache.tables, launch=in_process_launch, log=str)
    expected = entry_bytes()
    shutil.rmtree(cache.recipe.cache_dir)
    spread = cache.with_settings(accelerate={"num_processes": ranks})
    launch = SpreadLaunch(spread.recipe)
    result = cache_latents(spread.recipe, spread.buckets(), spread.tables, launch=launch, log=str)
    assert entry_bytes() == expected
    assert result.report["encoded"] == samples
    encoded_keys = [key for keys in launch.encoded_keys.values() for key in keys]
    assert sorted(encoded_keys) == sorted(result.table["key"])
    assert sorted(launch.encoded_keys) == list(range(ranks)), "a rank wrote no results"
    assert max(map(len, launch.encoded_keys.values())) <= -(-samples // ranks) + 1, (
        "the samples are not evenly distributed over the ranks"
    )


class SpreadLaunch:
    """Launch with accelerate and record the keys that each rank encoded.

    A rank given as `victim` is killed at its first result.
    """

    def __init__(self, recipe: Recipe, victim: int | None = None) -> None:
        self._launch = LocalLaunch(recipe.accelerate)
        self._victim = victim
        self.encoded_keys: dict[int, list[str]] = {}

    def __call__(self, module: str, encoding: Path, meanwhile: Meanwhile) -> None:
        with ThreadPoolExecutor(1) as pool:
            killed = pool.submit(self._kill, encoding) if self._victim is not None else None
            try:
                self._launch(module, encoding, meanwhile)
            finally:
                for path in encoding.parent.glob("results-*.jsonl"):
                    lines = [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()]
                    rank = int(path.stem.removeprefix("results-"))
                    self.encoded_keys[rank] = [line["key"] for line in lines if line.get("outcome") == "made"]
                if killed is not None:
                    killed.result()

    def _kill(self, encoding: Path) -> None:
        results = encoding.parent / f"results-{self._victim}.jsonl"
        deadline_s = time.monotonic() + 100
        while not (results.is_file() and results.stat().st_size):
            assert time.monotonic() < deadline_s, "the rank to kill wrote no result"
            time.sleep(0.002)
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess):  # also raised for zombies
                if str(encoding) in process.cmdline() and process.environ().get("RANK") == str(self._victim):
                    process.kill()
                    return
        raise AssertionError("no process has the rank to kill")


def launched_processes() -> set[psutil.Process]:
    """Return the processes that this one launched, also those whose parent is gone."""
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("LATENTLINE_PARENT_PID") == str(os.getpid()):
                found.add(process)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_L08_a_killed_rank_fails_the_stage_and_loses_only_entries_in_flight(
    cache: Any, in_process_launch: Any, entry_bytes: Any
) -> None:
    cache = with_images(cache, 150)
    cache_latents(cache.recipe, cache.buckets(), cache.tables, launch=in_process_launch, log=str)
    expected = entry_bytes()
    shutil.rmtree(cache.recipe.cache_dir)
    spread = cache.with_settings(accelerate={"num_processes": 3})
    buckets = spread.buckets()
    launch = SpreadLaunch(spread.recipe, victim=1)
    earlier = launched_processes()
    with pytest.raises(LaunchError, match=r"exit status|signal"):
        cache_latents(spread.recipe, buckets, spread.tables, launch=launch, log=str)
    assert launched_processes() <= earlier
    survived = entry_bytes()
    assert 0 < len(survived) < 150
    assert survived.items() <= expected.items()
    resumed = cache_latents(spread.recipe, buckets, spread.tables, launch=in_process_launch, log=str)
    assert resumed.report["encoded"] == 150 - len(survived)
    assert entry_bytes() == expected


FATES = ("kept", "vanished", "changed", "cut", "a folder", "no image")


def test_L02_samples_that_fail_do_not_affect_the_latents_of_the_others(
    cache: Any, in_process_launch: Any
) -> None:
    """Each remaining entry equals, byte for byte, the entry of its image encoded alone."""
    expected_alone = encoded_alone(cache, in_process_launch)

    @settings(max_examples=8)
    @given(fates=st.lists(st.sampled_from(FATES), min_size=5, max_size=5))
    def check(fates: list[str]) -> None:
        shutil.rmtree(cache.recipe.cache_dir)
        check_fates(cache, in_process_launch, expected_alone, fates)

    check()


def check_fates(cache: Any, launch: Any, expected_alone: dict[str, bytes], fates: list[str]) -> None:
    """Encode a dataset with damaged images; `fates` has one entry for each image."""
    buckets = cache.buckets()
    paths = [cache.photos / name for name in buckets["path"]]
    before = {path: path.read_bytes() for path in paths}
    try:
        for path, fate in zip(paths, fates, strict=True):
            damage_image(path, fate)
        result = cache_latents(cache.recipe, buckets, cache.tables, launch=launch, log=str)
    finally:
        for path, data in before.items():
            if path.is_dir():
                path.rmdir()
            path.write_bytes(data)
    valid_names = [name for name, fate in zip(buckets["sample_id"], fates, strict=True) if fate == "kept"]
    assert result.table["sample_id"].to_list() == valid_names
    assert sorted(result.rejected["sample_id"]) == sorted(set(buckets["sample_id"]) - set(valid_names))
    store = RecipeEntries(cache.recipe).store
    for row in result.table.to_dicts():
        spec = RecipeEntries(cache.recipe).latent_spec(row)
        assert store.path(spec).read_bytes() == expected_alone[row["sample_id"]]
    assert visible(cache.recipe) == set(result.table["key"])


def damage_image(path: Path, fate: str) -> None:
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
    """Return the entry bytes of each sample, encoded in a separate run."""
    bytes_by_sample: dict[str, bytes] = {}
    for row in cache.buckets().iter_slices(1):
        result = cache_latents(cache.recipe, row, cache.tables, launch=launch, log=str)
        (encoded_row,) = result.table.to_dicts()
        spec = RecipeEntries(cache.recipe).latent_spec(encoded_row)
        bytes_by_sample[encoded_row["sample_id"]] = RecipeEntries(cache.recipe).store.path(spec).read_bytes()
    return bytes_by_sample


@pytest.mark.slow
def test_L14_a_disk_that_fills_up_during_a_job_loses_no_entry_and_the_next_run_resumes(
    photos: Path, tiny_sd: Path
) -> None:
    command = [*namespace(), sys.executable, "-m", "tests.pipeline.encoding.full_cache_disk"]
    process = subprocess.run(
        [*command, str(photos.parent), str(tiny_sd)], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr[-3000:]
    observed = json.loads(process.stdout.splitlines()[-1])
    filled, full, room = observed["filled"], observed["full"], observed["room"]

    assert "the disk is full: an entry of " in filled["error"]
    assert str(photos.parent / "cache" / "latents") in filled["error"]
    assert "existing entries stay valid" in filled["error"]
    assert [Path(name).suffix for name in filled["files"]] == [".safetensors"] * 2, (
        "a temporary file was not removed"
    )

    assert "bytes free for the missing entries" in full["error"]
    assert "(67,108,864 of them stay free), got 0" in full["error"]
    assert full["launched"] == filled["launched"] == 1, (
        "the space estimate must run before the encoder starts"
    )
    assert full["files"] == filled["files"]
    assert "cannot be recorded in the cache: the disk is full" in observed["text"]["error"]
    assert "free space on that disk" in observed["text"]["error"]
    assert observed["text"]["launched"] == 1

    assert room["error"] == ""
    assert {name: room["report"][name] for name in ("encoded", "reused", "damaged")} == {
        "encoded": 3,
        "reused": 2,
        "damaged": 0,
    }
    assert {name: room["files"][name] for name in filled["files"]} == filled["files"]


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize(
    "counts", [(1_000, 16_000), pytest.param((10_000, 100_000), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("kind", ["latents", "text"])
def test_L12_planning_a_cold_cache_takes_less_than_one_kilobyte_per_sample(
    tiny_sd: Path, tmp_path: Path, kind: Kind, counts: tuple[int, int]
) -> None:
    few, many = peaks_of_planning(tiny_sd, tmp_path, kind, counts)
    bytes_per_sample = (many - few) / (counts[1] - counts[0])
    sys.stdout.write(
        f"{kind}: {bytes_per_sample:.0f} bytes per sample, {many / 2**20:.0f} MiB for {counts[1]}\n"
    )
    assert bytes_per_sample < 1000


def peaks_of_planning(base: Path, folder: Path, kind: Kind, counts: tuple[int, int]) -> tuple[int, int]:
    command = [sys.executable, "-m", "tests.pipeline.encoding.planning_memory"]
    command += [str(base), str(folder), kind, *map(str, counts)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    few, many = map(int, process.stdout.split())
    return few, many
