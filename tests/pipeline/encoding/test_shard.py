"""Encoding by workers that have only the cache in common: shards, restarts, errors, and the base model."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from pipeline.cache import sealing
from pipeline.cache.backends import cache_folder
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cli import encode as encode_command
from pipeline.encoding.collecting import encode_on_workers
from pipeline.encoding.jobs import read_encoding, share
from pipeline.encoding.shard import encode_shard
from pipeline.encoding.shared_encoding import Shard, SharedEncoding, parse_shard
from pipeline.errors import LatentlineError, LaunchError, ModelError, StoreError
from pipeline.maintenance import gc
from pipeline.processes.launch import Meanwhile, launch_environment
from pipeline.recipe import AccelerateSettings, Recipe
from pipeline.text_embeddings.stage import cache_text
from pipeline.vae_latents.stage import cache_latents
from tests.pipeline.cache_case import Cache, recipe_of
from tests.pipeline.encoding.forged import forged

NUM_SHARDS = 4


@pytest.fixture(params=["folder", "memory"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the address of an empty cache: a disk that all machines mount, or an object store."""
    name = f"cache-{uuid.uuid4().hex[:8]}"
    return f"memory://{name}/of/mine" if request.param == "memory" else str(tmp_path / name)


def at(cache: Cache, address: str) -> Cache:
    """Return the same project with its cache at another address."""
    root, model = cache.recipe.output_dir.parent, cache.recipe.model.base
    return Cache(recipe_of(root, cache.photos, model, cache_dir=address), cache.photos)


@dataclass
class OnWorkers:
    """A `Launch` that shares the encoding; by default, its shards are encoded here, one after another."""

    worker_launch: Any
    run_workers: Callable[[SharedEncoding], Sequence[str]] | None = None
    encodings: list[SharedEncoding] = field(default_factory=list[SharedEncoding])
    lines: list[str] = field(default_factory=list[str])

    def __call__(self, module: str, encoding: Path, meanwhile: Meanwhile | None = None) -> None:
        if meanwhile is not None:
            meanwhile()
        run = self.run_workers or self.run_here
        settings = {"max_workers": NUM_SHARDS, "cpu_threads": 2, "log": self.lines.append}
        encode_on_workers(
            encoding, lambda shared, _: (self.encodings.append(shared), run(shared))[1], **settings
        )

    def run_here(self, encoding: SharedEncoding) -> Sequence[str]:
        for index in range(NUM_SHARDS):
            self.encode(encoding, Shard(index, NUM_SHARDS))
        return []

    def encode(self, encoding: SharedEncoding, shard: Shard) -> None:
        encode_shard(
            SharedEncoding(encoding.address), shard, log=self.lines.append, launch=self.worker_launch
        )


def entries_at(recipe: Recipe) -> dict[str, bytes]:
    folder = cache_folder(recipe.cache_dir)
    return {f.name: folder.read(f.name) for f in folder.files() if f.name.endswith(".safetensors")}


def other_files(recipe: Recipe) -> list[str]:
    names = [file.name for file in cache_folder(recipe.cache_dir).files()]
    return [name for name in names if name.startswith("encodings/")]


def latents(cache: Cache, launch: Any, **settings: Any) -> Any:
    return cache_latents(cache.recipe, cache.buckets(), cache.tables, launch=launch, log=str, **settings)


def test_four_workers_write_the_bytes_tables_reports_and_pictures_of_one_process(
    cache: Cache, address: str, in_process_launch: Any
) -> None:
    (cache.photos / "broken.png").write_bytes((cache.photos / "cat.png").read_bytes())
    (cache.photos / "broken.txt").write_text("a file that changes after the scan")
    buckets, captions = cache.buckets(), cache.captions()
    (cache.photos / "broken.png").write_bytes(b"no image any more")
    stages = ((cache_latents, buckets), (cache_text, captions))

    def run(project: Cache, launch: Any) -> list[Any]:
        return [stage(project.recipe, rows, project.tables, launch=launch, log=str) for stage, rows in stages]

    alone = run(cache, in_process_launch)
    reports = cache.recipe.output_dir / "reports" / "vae_latents"
    pictures = {path.name for path in reports.glob("*.jpg")}
    shutil.rmtree(cache.recipe.output_dir)

    shared = at(cache, address)
    together = run(shared, OnWorkers(in_process_launch))
    assert entries_at(shared.recipe) == entries_at(cache.recipe)
    assert {path.name for path in reports.glob("*.jpg")} == pictures != set()
    for one, several in zip(alone, together, strict=True):
        keys = [name for name in one.table.columns if not name.startswith("entry_")]
        assert several.table.select(keys).equals(one.table.select(keys))
        assert several.rejected.equals(one.rejected)
        counters = ("encoded", "reused", "failed", "removed", "rejected")
        assert [several.report[name] for name in counters] == [one.report[name] for name in counters]
    assert alone[0].report["failed"] == 1, "the broken image fails on a worker as in one process"
    assert other_files(shared.recipe) == [], "encodings are removed after success"


@pytest.mark.parametrize("on_workers", [True, False], ids=["workers", "one process"])
def test_new_entries_are_packed_if_the_launcher_demands_it(
    cache: Cache,
    address: str,
    in_process_launch: Any,
    monkeypatch: pytest.MonkeyPatch,
    on_workers: bool,
) -> None:
    shared = at(cache, address)
    launch = OnWorkers(in_process_launch) if on_workers else in_process_launch
    entries = shared.keep("vae_latents", latents(shared, launch, seal_packs=True)).table["key"]
    store = RecipeEntries(shared.recipe).store
    assert store.packed("latents", entries) == set(), "few new entries are not packed"

    for name in entries_at(shared.recipe):
        cache_folder(shared.recipe.cache_dir).delete(name)
    monkeypatch.setattr(sealing, "MIN_NEW", 1)
    before = set(latents(shared, launch, seal_packs=True).table["key"])
    store = RecipeEntries(shared.recipe).store
    assert store.packed("latents", entries) == before == set(entries)
    num_packs = sum(name.endswith(".pack") for name in store.folder.stats("packs/latents"))
    assert num_packs == (NUM_SHARDS if on_workers else 1)
    assert len(entries_at(shared.recipe)) == len(before), "the single files stay"


def test_a_worker_that_ends_early_is_reported_and_a_restart_of_its_shard_encodes_only_the_rest(
    cache: Cache, address: str, in_process_launch: Any, forbidden_launch: Any
) -> None:
    shared = at(cache, address)

    def all_but_shard_2(encoding: SharedEncoding) -> Sequence[str]:
        for index in (3, 1, 0):
            launch.encode(encoding, Shard(index, NUM_SHARDS))
        return ["slurmstepd: error: Detected 1 oom_kill event"]

    launch = OnWorkers(in_process_launch, all_but_shard_2)
    with pytest.raises(LaunchError, match=r"1 shard is incomplete, .* 2/4") as caught:
        latents(shared, launch)
    assert "oom_kill" in caught.value.where
    assert str(launch.encodings[0].address) in caught.value.where
    before = entries_at(shared.recipe)
    assert len(before) == 4

    launch.worker_launch = forbidden_launch
    launch.encode(launch.encodings[0], Shard(1, NUM_SHARDS))
    assert "finished earlier" in launch.lines[-1]

    in_process_launch.modules.clear()
    launch.worker_launch = in_process_launch
    launch.encode(launch.encodings[0], Shard(2, NUM_SHARDS))
    assert len(in_process_launch.modules) == 1
    assert before.items() < entries_at(shared.recipe).items()
    latents(shared, forbidden_launch)


def test_gc_lists_orders_of_failed_jobs_keeps_young_ones_and_deletes_old_ones(
    cache: Cache, address: str, in_process_launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = at(cache, address)
    with pytest.raises(LaunchError):
        latents(shared, OnWorkers(in_process_launch, lambda _: []))
    young = gc.survey(shared.recipe.cache_dir)
    assert (young.num_young_encodings, young.num_old_encodings, young.foreign) == (1, 0, [])
    monkeypatch.setattr(gc, "OLD_S", -60.0)
    old = gc.survey(shared.recipe.cache_dir)
    assert (old.num_young_encodings, old.num_old_encodings) == (0, 1)
    assert sorted(old.old_encodings) == other_files(shared.recipe)
    gc.delete(shared.recipe.cache_dir, old)
    assert other_files(shared.recipe) == []
    if isinstance(shared.recipe.cache_dir, Path):
        assert list((shared.recipe.cache_dir / "encodings").iterdir()) == []


def test_the_error_of_a_worker_is_raised_by_the_stage_with_its_shard(
    cache: Cache, in_process_launch: Any
) -> None:
    def full_disk(module: str, encoding: Path) -> None:
        raise StoreError("the disk is full", where="worker-7:/scratch", fix="free some space")

    def run(encoding: SharedEncoding) -> Sequence[str]:
        with pytest.raises(StoreError):
            encode_shard(encoding, Shard(1, NUM_SHARDS), log=str, launch=full_disk)
        return []

    with pytest.raises(StoreError, match="disk is full") as caught:
        latents(cache, OnWorkers(in_process_launch, run))
    assert caught.value.where == "encoding shard 1/4: worker-7:/scratch"


def test_a_worker_resolves_a_model_that_its_disk_lacks_and_refuses_one_that_differs(
    cache: Cache, tiny_sd: Path, tmp_path: Path, in_process_launch: Any
) -> None:
    here, there = tmp_path / "model", tmp_path / "moved"
    shutil.copytree(tiny_sd, here)
    project = Cache(recipe_of(tmp_path, cache.photos, here), cache.photos)
    errors: list[LatentlineError] = []

    def run(encoding: SharedEncoding) -> Sequence[str]:
        # The folder is missing on this worker.
        here.rename(there)
        with pytest.raises(ModelError) as missing:
            launch.encode(encoding, Shard(0, NUM_SHARDS))
        there.rename(here)

        # The worker has other weights at the same path.
        config = here / "vae" / "config.json"
        original = config.read_text()
        config.write_text(json.dumps(json.loads(original) | {"scaling_factor": 0.5}))
        with pytest.raises(ModelError) as other:
            launch.encode(encoding, Shard(0, NUM_SHARDS))
        config.write_text(original)

        errors.extend([missing.value, other.value])
        return launch.run_here(encoding)

    launch = OnWorkers(in_process_launch, run)
    assert latents(project, launch).report["encoded"] == 5
    missing, other = errors
    assert "not on this worker" in missing.what
    assert "Hub id" in missing.fix
    assert "differs from the stage's" in other.what


@pytest.mark.parametrize(
    ("name", "pattern", "other"),
    [
        ("jobs-00000.jsonl", r'"key": "\w{64}"', '"key": "../../../../evil"'),
        ("jobs-00000.jsonl", r'"key": "(\w{64})"', r'"key": "\1/../../evil"'),
        ("jobs-00000.jsonl", r'"key": "\w{64}"', '"key": 7'),
        ("jobs-00000.jsonl", r'"kind": "latents"', '"kind": "../../evil"'),
        ("jobs-00000.jsonl", r"\n\{", "\n" + "[" * 100_000),
        ("encoding.json", r'"key": "\w{64}"', '"key": "../../../../evil"'),
        ("encoding.json", r'"kind": "latents"', '"kind": "evil"'),
        ("encoding.json", r'"model": ', '"former": '),
        ("encoding.json", r'"base": ', '"bass": '),
        ("encoding.json", r'"cpu_threads": \d+', '"cpu_threads": "all"'),
    ],
)
def test_an_encoding_that_latentline_did_not_write_is_an_error_and_writes_nothing(
    cache: Cache, tmp_path: Path, in_process_launch: Any, name: str, pattern: str, other: str
) -> None:
    def run(encoding: SharedEncoding) -> Sequence[str]:
        text = encoding.read(name).decode()
        changed = re.sub(pattern, other, text)
        assert changed != text
        before = set(tmp_path.rglob("*.safetensors"))
        with pytest.raises(StoreError, match="a file of the encoding is damaged"):
            launch.run_here(forged(encoding, name, changed.encode()))
        assert set(tmp_path.rglob("*.safetensors")) == before
        return []

    launch = OnWorkers(in_process_launch, run)
    with pytest.raises(LatentlineError):
        latents(at(cache, str(tmp_path / "a" / "b" / "c" / "cache")), launch)
    assert launch.encodings


@pytest.mark.parametrize(
    ("name", "pattern", "other"),
    [
        ("jobs-00000.jsonl", r'"root": "[^"]*"', '"root": "/etc"'),
        ("jobs-00000.jsonl", r'"root": "[^"]*"', '"root": "http://169.254.169.254"'),
        ("jobs-00000.jsonl", r'"cost": \d+', '"cost": 1000000'),
        ("encoding.json", r'"model_folder": "[^"]*"', '"model_folder": "/home/guest/model"'),
        ("encoding.json", r'"allow_pickle": false', '"allow_pickle": true'),
        ("encoding.json", r'"base": "[^"]*"', '"base": "guest/model"'),
        ("encoding.json", r'"fingerprint": "[^"]*"', '"fingerprint": "0"'),
        ("encoding.json", r'"num_shards": \d+', '"num_shards": 1'),
        ("encoding.json", r'"jobs_sha256": \["\w{4}', '"jobs_sha256": ["0000'),
    ],
)
def test_whoever_may_write_the_cache_does_not_choose_what_workers_read_and_load(
    cache: Cache, in_process_launch: Any, name: str, pattern: str, other: str
) -> None:
    def run(encoding: SharedEncoding) -> Sequence[str]:
        before = encoding.read(name)
        changed = re.sub(pattern, other, before.decode())
        assert changed.encode() != before
        encoding.put(name, changed.encode())
        with pytest.raises(StoreError, match="has changed since the job wrote it") as raised:
            launch.run_here(encoding)
        assert name in raised.value.where
        assert entries_at(cache.recipe) == {}

        # Started again after the file was restored, the workers encode it.
        encoding.put(name, before)
        return launch.run_here(encoding)

    launch = OnWorkers(in_process_launch, run)
    assert latents(cache, launch).report["encoded"] == 5


def test_shards_have_about_equal_cost_and_every_job_is_in_one(
    cache: Cache, in_process_launch: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def run(encoding: SharedEncoding) -> Sequence[str]:
        jobs = list(read_encoding(encoding.fetch(tmp_path_factory.mktemp("worker"))[0]).jobs)
        shares = [list(share(jobs, index, 3)) for index in range(3)]
        assert sorted(job.spec.key for each in shares for job in each) == sorted(j.spec.key for j in jobs)
        costs = [sum(job.cost for job in each) for each in shares]
        assert max(costs) - min(costs) <= max(job.cost for job in jobs)
        return launch.run_here(encoding)

    launch = OnWorkers(in_process_launch, run)
    latents(cache, launch)


@pytest.mark.parametrize("text", ["3/3", "-1/3", "a/3", "1", "1/0", ""])
def test_a_wrong_shard_is_a_usage_error_that_shows_a_correct_one(text: str) -> None:
    with pytest.raises(ValueError, match="0/8 to 7/8"):
        parse_shard(text)
    result = CliRunner().invoke(encode_command.command, ["somewhere", "--shard", text])
    assert result.exit_code == 2
    assert "0/8 to 7/8" in result.output


@pytest.mark.parametrize("name", encode_command.INDEX_VARIABLES)
def test_the_index_comes_from_the_scheduler_and_the_number_of_shards_from_the_order(
    cache: Cache, in_process_launch: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def run(encoding: SharedEncoding) -> Sequence[str]:
        assert encode_command.shard_of_environment(encoding) == Shard(0, 1)
        monkeypatch.setenv(name, "3")
        monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "1")  # one task of the array was started again
        assert encode_command.shard_of_environment(encoding) == Shard(3, 4)
        monkeypatch.setenv(name, "4")
        with pytest.raises(LaunchError, match="from 0 to 3, got 4"):
            encode_command.shard_of_environment(encoding)
        return launch.run_here(encoding)

    launch = OnWorkers(in_process_launch, run)
    latents(cache, launch)


def test_an_unknown_order_and_one_of_another_version_are_errors_with_a_fix(
    cache: Cache, in_process_launch: Any
) -> None:
    with pytest.raises(StoreError, match="the encoding does not exist"):
        SharedEncoding(cache.recipe.cache_dir / "encodings" / "x").settings()

    def run(encoding: SharedEncoding) -> Sequence[str]:
        original = encoding.read("encoding.json")
        encoding.put(
            "encoding.json", json.dumps(json.loads(original) | {"versions": {"encoding": 99}}).encode()
        )
        with pytest.raises(StoreError, match="another version"):
            launch.encode(encoding, Shard(0, 4))
        encoding.put("encoding.json", original)
        return launch.run_here(encoding)

    launch = OnWorkers(in_process_launch, run)
    latents(cache, launch)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_of_four_processes_on_s3_is_killed_and_only_its_rest_is_encoded_again(
    cache: Cache, s3: str, in_process_launch: Any, forbidden_launch: Any
) -> None:
    bucket = f"cache-{uuid.uuid4().hex[:8]}"
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
    for path in cache.photos.iterdir():
        path.unlink()
    for index in range(240):
        levels = np.random.default_rng(index).integers(0, 256, (64 + 16 * (index % 3), 64, 3), dtype=np.uint8)
        Image.fromarray(levels).save(cache.photos / f"{index:03}.png")
    latents(cache, in_process_launch)
    expected = entries_at(cache.recipe)
    shutil.rmtree(cache.recipe.output_dir)
    shared, victim = at(cache, f"s3://{bucket}/of/mine"), Shard(2, NUM_SHARDS)

    def run(encoding: SharedEncoding) -> Sequence[str]:
        workers = [started(encoding, Shard(index, NUM_SHARDS)) for index in range(NUM_SHARDS)]
        while not any(each.name.startswith(f"results-{victim.in_names}") for each in encoding.files()):
            assert workers[victim.index].poll() is None
            time.sleep(0.05)
        workers[victim.index].send_signal(signal.SIGKILL)
        statuses = [worker.wait() for worker in workers]
        assert statuses == [0, 0, -signal.SIGKILL, 0]
        return []

    launch = OnWorkers(in_process_launch, run)
    with pytest.raises(LaunchError, match=r"1 shard is incomplete, .* 2/4"):
        latents(shared, launch)
    survived = entries_at(shared.recipe)
    assert 180 < len(survived) < 240
    assert survived.items() < expected.items()

    (encoding,) = launch.encodings
    assert started(encoding, victim).wait() == 0
    outcomes = [line["outcome"] for line in last_attempt(encoding, victim) if "outcome" in line]
    assert outcomes.count("made") == 240 - len(survived), "only the missing entries were encoded"
    assert len(outcomes) == 60
    assert entries_at(shared.recipe) == expected
    assert latents(shared, forbidden_launch).report["entries"] == 240


def started(encoding: SharedEncoding, shard: Shard) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pipeline.cli", "encode", str(encoding.address), "--shard", str(shard)]
    environment = launch_environment(AccelerateSettings(), Path("unused"))
    del environment["LATENTLINE_PARENT_PID"], environment["LATENTLINE_ERROR_FILE"]
    return subprocess.Popen(command, env=environment | os.environ)


def last_attempt(encoding: SharedEncoding, shard: Shard) -> Iterator[dict[str, Any]]:
    """Yield the results of the attempt at a shard that has finished."""
    names = [each.name for each in encoding.files() if each.name.startswith(f"results-{shard.in_names}-")]
    lines = {name: [json.loads(line) for line in encoding.read(name).splitlines()] for name in names}
    last = next(name for name in names if any("work_s" in line for line in lines[name]))
    attempt = last.rpartition("-")[0]
    for name in names:
        if name.startswith(attempt):
            yield from lines[name]
