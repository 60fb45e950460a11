"""Captions whose entries are as long as they are, through cache, gates and repair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from demo.tiny_models import make_tiny_z_image
from pipeline.cache.entry_format import DATA_START, serialise
from pipeline.cache.requests import RecipeEntries
from pipeline.maintenance.verify import needed_entries, verify
from pipeline.trained_lora.samples import training_inputs
from tests.pipeline.cached_job import Job, recipe_of

ASSET = "text_embeddings"


@pytest.fixture
def job(tmp_path: Path, photos: Path, launch_here: Any) -> Job:
    make_tiny_z_image(tmp_path / "base")
    (photos / "cat.txt").write_text("a cat " * 30, encoding="utf-8")
    made = Job(recipe_of(photos.parent, tmp_path / "base"), launch_here)
    made.run()
    return made


def test_T03_each_entry_is_as_long_as_its_caption_and_the_table_says_so(job: Job) -> None:
    table, entries = job.tables.read(ASSET), RecipeEntries(job.recipe)
    assert table["text_length"].n_unique() > 2
    assert (table["text_length"] == table["num_tokens"]).all()
    longest = entries.text_spec("").tensors["text_embedding"]
    one_token = longest.num_bytes // longest.shape[0]
    for row in table.to_dicts():
        size = entries.store.path(entries.text_spec(row["caption"])).stat().st_size
        assert size == row["entry_bytes"] == DATA_START + row["text_length"] * one_token
    assert job.failing(ASSET) == {}


def test_T03_a_warm_run_trusts_them_and_one_without_a_table_reads_their_lengths(
    job: Job, forbidden_launch: Any
) -> None:
    before = job.tables.read(ASSET)
    warm = Job(job.recipe, forbidden_launch)
    warm.cache()
    assert warm.tables.read(ASSET).equals(before)
    warm.tables.path(ASSET).unlink()
    warm.cache()
    assert warm.tables.read(ASSET).equals(before)


def test_T02_a_table_that_says_another_length_closes_the_gate(job: Job) -> None:
    table = job.tables.read(ASSET)
    wrong = pl.when(pl.col("sample_id") == "photos/cat.png")
    job.tables.write(
        ASSET, table.with_columns(text_length=wrong.then(pl.col("text_length") - 1).otherwise("text_length"))
    )
    failing = job.failing(ASSET)
    assert set(failing) == {"file_size_outliers"}
    assert [row["sample_id"] for row in failing["file_size_outliers"].rows] == ["photos/cat.png"]
    job.tables.write(ASSET, table.with_columns(text_length=wrong.then(513).otherwise("text_length")))
    assert "at most 512" in job.failing(ASSET)["shape_uniformity"].summary


def test_L07_an_entry_of_a_shorter_caption_under_its_name_is_found_and_made_again(job: Job) -> None:
    entries, path = RecipeEntries(job.recipe), job.entry(ASSET)
    sound = path.read_bytes()
    spec = entries.text_spec(job.tables.read(ASSET).filter(sample_id="photos/cat.png")["caption"][0])
    values = entries.store.read(spec)["text_embedding"]
    path.write_bytes(serialise(spec, {"text_embedding": values[:-1]}, {}))
    assert set(job.failing(ASSET)) == {"file_size_outliers"}
    (bad,) = verify(job.recipe, needed_entries(job.recipe, job.tables), lambda states: states)
    assert bad.path == str(path)
    path.write_bytes(job.entry(ASSET, "photos/rocket.png").read_bytes())
    assert set(job.failing(ASSET)) == {"file_size_outliers"}
    job.cache()
    assert job.failing(ASSET) == {}
    assert path.read_bytes() == sound


def test_training_asks_for_entries_of_the_recorded_length_and_remembers_it(job: Job) -> None:
    table = job.tables.read(ASSET)
    inputs = training_inputs(job.recipe, RecipeEntries(job.recipe), job.tables.read("vae_latents"), table)
    lengths = dict(table.select("sample_id", "text_length").iter_rows())
    for item in inputs:
        (tensor,) = item.variants[0].entry.tensors.values()
        assert not tensor.ragged
        assert tensor.shape[0] == lengths[item.sample_id]
