"""The gates on text entries, and on ragged ones, which are as long as their captions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from demo.tiny_models import make_tiny_z_image
from pipeline.cache.entry_format import DATA_START, serialise
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.maintenance.verify import needed_entries, verify
from pipeline.trained_lora.inputs import training_inputs
from tests.pipeline.cached_job import Job, recipe_of

ASSET = "text_embeddings"


@pytest.fixture
def job(tmp_path: Path, photos: Path, in_process_launch: Any) -> Job:
    make_tiny_z_image(tmp_path / "base")
    (photos / "cat.txt").write_text("a cat " * 30, encoding="utf-8")
    cached_job = Job(recipe_of(photos.parent, tmp_path / "base"), in_process_launch)
    cached_job.run()
    return cached_job


def test_T03_each_entry_is_as_long_as_its_caption_and_the_table_records_the_length(job: Job) -> None:
    table, entries = job.tables.read(ASSET), RecipeEntries(job.recipe)
    assert table["text_length"].n_unique() > 2
    assert (table["text_length"] == table["num_tokens"]).all()
    longest = entries.text_spec("").tensors["text_embedding"]
    one_token = longest.num_bytes // longest.shape[0]
    for row in table.to_dicts():
        size = entries.store.path(entries.text_spec(row["caption"])).stat().st_size
        assert size == row["entry_bytes"] == DATA_START + row["text_length"] * one_token
    assert job.failing(ASSET) == {}


def test_T03_a_warm_run_uses_the_recorded_lengths_and_a_run_without_a_table_reads_them(
    job: Job, forbidden_launch: Any
) -> None:
    before = job.tables.read(ASSET)
    warm = Job(job.recipe, forbidden_launch)
    warm.cache()
    assert warm.tables.read(ASSET).equals(before)
    warm.tables.path(ASSET).unlink()
    warm.cache()
    assert warm.tables.read(ASSET).equals(before)


def test_T02_a_wrong_length_in_the_table_closes_the_gate(job: Job) -> None:
    table = job.tables.read(ASSET)
    is_cat = pl.when(pl.col("sample_id") == "photos/cat.png")
    job.tables.write(
        ASSET, table.with_columns(text_length=is_cat.then(pl.col("text_length") - 1).otherwise("text_length"))
    )
    failing = job.failing(ASSET)
    assert set(failing) == {"file_size_outliers"}
    assert [row["sample_id"] for row in failing["file_size_outliers"].rows] == ["photos/cat.png"]


def test_T02_shape_uniformity_accepts_lengths_from_one_token_to_the_maximum(job: Job) -> None:
    table, length = job.tables.read(ASSET), pl.col("text_length")
    is_cat = pl.col("sample_id") == "photos/cat.png"
    problems: dict[int, str] = {}
    for number in (0, 1, 512, 513):
        job.tables.write(
            ASSET, table.with_columns(text_length=pl.when(is_cat).then(number).otherwise(length))
        )
        finding = job.failing(ASSET).get("shape_uniformity")
        problems[number] = "" if finding is None else finding.rows[0]["problem"]
    wrong = "its text embedding must have at most 512 tokens, got "
    assert problems == {0: f"{wrong}0", 1: "", 512: "", 513: f"{wrong}513"}


def test_L07_an_entry_replaced_with_a_shorter_one_is_reported_and_encoded_again(job: Job) -> None:
    entries, path = RecipeEntries(job.recipe), job.entry(ASSET)
    sound = path.read_bytes()
    spec = entries.text_spec(job.tables.read(ASSET).filter(sample_id="photos/cat.png")["caption"][0])
    values = entries.store.read(spec)["text_embedding"]
    path.write_bytes(serialise(spec, {"text_embedding": values[:-1]}, {}))
    assert set(job.failing(ASSET)) == {"file_size_outliers"}
    (bad,) = verify(job.recipe, needed_entries(job.recipe, job.tables), log=print)
    assert bad.path == str(path)
    path.write_bytes(job.entry(ASSET, "photos/rocket.png").read_bytes())
    assert set(job.failing(ASSET)) == {"file_size_outliers"}
    job.cache()
    assert job.failing(ASSET) == {}
    assert path.read_bytes() == sound


def test_training_inputs_have_entries_of_the_recorded_length(job: Job) -> None:
    table = job.tables.read(ASSET)
    inputs = training_inputs(job.recipe, RecipeEntries(job.recipe), job.tables.read("vae_latents"), table)
    lengths = dict(table.select("sample_id", "text_length").iter_rows())
    for item in inputs:
        (tensor,) = item.variants[0].entry.tensors.values()
        assert not tensor.ragged
        assert tensor.shape[0] == lengths[item.sample_id]
