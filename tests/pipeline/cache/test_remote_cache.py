"""Every stage, gate and command on a remote cache, in an object store and in memory."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import polars as pl
import pytest
import torch

from pipeline.cache.folder import entry_name
from pipeline.cache.recipe_entries import STAT_COLUMNS, RecipeEntries
from pipeline.errors import StoreError
from pipeline.maintenance.explain import explain
from pipeline.maintenance.forecast import forecast
from pipeline.maintenance.gc import delete, needed_keys, survey
from pipeline.maintenance.verify import needed_entries, verify
from pipeline.models.worker.family import load_family
from pipeline.recipe import Recipe
from pipeline.recipe.isolation import check_isolation
from pipeline.storage.addresses import Url
from pipeline.storage.remote_folder import RemoteFolder
from pipeline.trained_lora.inputs import training_inputs
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.worker.loader import MicroBatchMaker, micro_inputs
from tests.pipeline.cached_job import ASSETS, Job, recipe_of
from tests.tensor_differences import differing_tensors


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.slow)])
def address(request: pytest.FixtureRequest) -> str:
    """Return the address of an empty cache."""
    name = f"cache-{uuid.uuid4().hex[:8]}"
    if request.param == "memory":
        return f"memory://{name}"
    request.getfixturevalue("s3")
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(name)
    return f"s3://{name}/of/mine"


@pytest.fixture
def job(address: str, tiny_sd: Path, tmp_path: Path, finished: Path, in_process_launch: Any) -> Job:
    """Return a copy of the finished project with its entries in the remote cache."""
    for name in ("photos", "out"):
        shutil.copytree(finished / name, tmp_path / name)
    remote = RemoteFolder(Url(address))
    for path in (finished / "cache").rglob("*"):
        if path.is_file():
            remote.put(path.relative_to(finished / "cache").as_posix(), path.read_bytes())
    cached_job = Job(recipe_of(tmp_path, tiny_sd, cache_dir=address), in_process_launch)
    cached_job.cache()
    assert in_process_launch.modules == []
    return cached_job


@pytest.fixture
def local_job(finished: Path, tiny_sd: Path, forbidden_launch: Any) -> Job:
    """Return the finished project, which the test only reads."""
    return Job(recipe_of(finished, tiny_sd), forbidden_launch)


def files(job: Job) -> Any:
    return RecipeEntries(job.recipe).store.folder.remote  # pyright: ignore[reportAttributeAccessIssue]


def spec_of(job: Job, asset: str, sample: str = "photos/cat.png") -> Any:
    entries = RecipeEntries(job.recipe)
    row = job.tables.read(asset).row(by_predicate=pl.col("sample_id") == sample, named=True)
    return entries.latent_spec(row) if asset == "vae_latents" else entries.text_spec(row["caption"])


def name_of(job: Job, asset: str) -> str:
    spec = spec_of(job, asset)
    return entry_name(spec.kind, spec.key)


def test_a_remote_cache_gets_the_entries_and_tables_of_a_local_one_and_a_warm_run_encodes_nothing(
    address: str, photos: Path, tiny_sd: Path, local_job: Job, in_process_launch: Any, forbidden_launch: Any
) -> None:
    job = Job(recipe_of(photos.parent, tiny_sd, cache_dir=address), in_process_launch)
    job.run()
    warm = Job(job.recipe, forbidden_launch)
    for asset in ASSETS:
        local_table = local_job.tables.read(asset).drop(STAT_COLUMNS)
        assert job.tables.read(asset).drop(STAT_COLUMNS).equals(local_table)
        assert job.failing(asset) == {}
    warm.cache()
    assert forecast(job.recipe, job.tables, log=lambda _: None).latents.to_make == 0

    local_paths = sorted(local_job.recipe.cache_dir.rglob("*.safetensors"))
    remote_names = {
        name.rpartition("/")[2]: name for name in files(job).list_files() if name.endswith(".safetensors")
    }
    assert sorted(remote_names) == sorted(path.name for path in local_paths)
    different = [
        path.name for path in local_paths if files(job).read(remote_names[path.name]) != path.read_bytes()
    ]
    assert different == [], "entries whose bytes differ from the local ones"


def test_L06_L07_damaged_entries_are_reported_with_their_addresses_and_the_next_run_repairs_them(
    job: Job, address: str
) -> None:
    store = RecipeEntries(job.recipe).store
    names = {asset: name_of(job, asset) for asset in ASSETS}
    undamaged = {asset: files(job).read(name) for asset, name in names.items()}

    def flip(data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1])

    for damage in (lambda data: data[:-1], flip, lambda _: b""):
        for asset, name in names.items():
            files(job).put(name, damage(undamaged[asset]))
            (finding,) = job.failing(asset).values()
            assert finding.rows[0]["path"] == f"{address}/{name}"
        bad = verify(job.recipe, needed_entries(job.recipe, job.tables), log=print)
        assert sorted(each.path for each in bad) == sorted(f"{address}/{name}" for name in names.values())
        assert {each.needed.name for each in bad} == {"photos/cat.png"}
        job.cache()
        assert {asset: files(job).read(name) for asset, name in names.items()} == undamaged

    for asset, name in names.items():
        store.discard(spec_of(job, asset))
        with pytest.raises(StoreError, match="cannot be read") as excinfo:
            store.read(spec_of(job, asset))
        assert excinfo.value.where == f"{address}/{name}"
    expected = forecast(job.recipe, job.tables, log=lambda _: None)
    assert (expected.latents.to_make, expected.text.to_make) == (1, 1)


def test_L13_garbage_collection_deletes_orphans_and_nothing_else(job: Job) -> None:
    orphan_paths = {name_of(job, asset) for asset in ASSETS}
    for suffix in (".png", ".txt"):
        (Path(job.recipe.datasets[0].path) / f"cat{suffix}").unlink()
    job.run()
    cache = job.recipe.cache_dir
    files(job).put("notes.txt", b"mine")
    assert survey(cache).num_used == survey(cache).entries
    # The lists of the first job and of the last one are all too old.
    orphan_survey = survey(cache, keep_s=-60, recipe_keys=needed_keys(job.recipe, log=print))
    assert set(orphan_survey.orphans) == orphan_paths
    assert orphan_survey.foreign == ["notes.txt"]
    before = set(files(job).list_files())
    delete(cache, orphan_survey)
    deleted = before - set(files(job).list_files())
    assert deleted == orphan_paths | set(orphan_survey.expired_lists)
    assert {asset: failing for asset in ASSETS if (failing := job.failing(asset))} == {}


def test_explain_shows_the_addresses_of_a_samples_entries(job: Job, address: str) -> None:
    facts_by_stage = {each.stage: each.facts for each in explain(job.recipe, job.tables, "photos/cat.png")}
    for stage in ("latents entry", "text entry"):
        assert facts_by_stage[stage]["state"] == "valid"
        assert facts_by_stage[stage]["path"].startswith(f"{address}/")


def test_training_reads_the_same_tensors_from_a_remote_cache_as_from_a_local_one(
    job: Job, local_job: Job, tiny_sd: Path
) -> None:
    family = load_family(tiny_sd)

    def read(job: Job) -> list[Any]:
        entries = RecipeEntries(job.recipe)
        inputs = training_inputs(job.recipe, entries, *(job.tables.read(asset) for asset in ASSETS))
        order = TrainingJob(job.recipe, entries.model_folder, "0" * 16, inputs, entries.text_spec(""), ())
        maker = MicroBatchMaker(order, family, family.noise.load_scheduler())
        batches = micro_inputs(order.plan(), maker, rank=0, start=0, pin=False)
        first_batches = [next(batches)[1] for _ in range(6)]
        batches.close()
        return first_batches

    for remote, local in zip(read(job), read(local_job), strict=True):
        assert remote.variant_ids == local.variant_ids
        assert torch.equal(remote.latent, local.latent)
        assert differing_tensors(remote.conditions, local.conditions) == []


def test_L01_a_cache_inside_a_dataset_is_refused_however_its_address_is_spelled(
    tmp_path: Path, tiny_sd: Path
) -> None:
    photos: Callable[[str], list[Any]] = lambda path: [{"name": "photos", "path": path}]  # noqa: E731

    def conflicts(recipe: Recipe) -> list[str]:
        return [conflict.relation for conflict in check_isolation(recipe)]

    for path, cache_dir, relation in (
        ("s3://bucket/photos", "s3://bucket/photos", ["same"]),
        ("s3://bucket/photos", "s3a://Bucket/photos/cache/", ["inside"]),
        ("s3://bucket/cache/photos", "s3://bucket/cache", ["contains"]),
        ("s3://bucket/photos", "s3://bucket/cache", []),
    ):
        recipe = recipe_of(tmp_path, tiny_sd, datasets=photos(path), cache_dir=cache_dir)
        assert conflicts(recipe) == relation, (path, cache_dir)
