"""Complete jobs with a dataset in an archive, and with a dataset or a cache in a bucket."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from PIL import Image

from tests.remote_folders import published_in_archive, published_in_bucket


@pytest.mark.usefixtures("s3")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["s3", "zip"])
def test_after_a_dataset_moved_to_remote_storage_only_changed_samples_are_encoded(
    cached: Any, tmp_path: Path, kind: str
) -> None:
    file = cached.data / "photo2.png"
    with Image.open(file) as image:
        pixels = 255 - np.asarray(image)
    Image.fromarray(pixels).save(file, compress_level=0)
    (cached.data / "photo3.txt").write_text("another caption\n", encoding="utf-8")
    published = (
        published_in_bucket(cached.data)
        if kind == "s3"
        else published_in_archive(cached.data, tmp_path / "photos.zip")
    )
    shutil.rmtree(cached.data)
    cached.recipe(datasets=[{"name": "photos", "path": published.address}])
    process = cached.dagster("job", "execute", "-m", "assets.definitions", "-j", "small_cache")
    assert process.returncode == 0, process.stderr[-3000:]
    for asset, reused in (("vae_latents", 4), ("text_embeddings", None)):
        report = cached.report(asset)
        assert (report["encoded"], report["failed"]) == (1, 0)
        assert reused is None or report["reused"] == reused
    assert cached.execute("cache").success
    assert cached.report("raw_images")["unchanged"] == 5
    assert cached.report("vae_latents")["encoded"] == 0


def test_a_wrong_address_fails_the_job_with_what_where_and_fix(fresh: Any) -> None:
    fresh.recipe(datasets=[{"name": "photos", "path": "zip://photos::none.zip"}])
    [failure] = fresh.execute("cache").get_step_failure_events()
    facts = failure.step_failure_data.user_failure_data.metadata
    assert "the dataset address does not exist" in str(facts["what"].value)
    assert facts["where"].value == f"zip://photos::{Path(__file__).resolve().parents[2]}/none.zip"
    assert "in datasets[].path" in str(facts["fix"].value)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("s3")
def test_a_cache_in_a_bucket_works_for_encoding_gates_commands_and_training(
    fresh: Any,
) -> None:
    """Each process opens the cache: two encoders, the commands, then the training."""
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("of-a-team")
    fresh.recipe(
        cache_dir="s3://of-a-team/cache",
        accelerate={"num_processes": 2},
        training={"steps": 2, "batch_size": 1, "sample_every": 2, "lora": {"rank": 2, "alpha": 2.0}},
    )
    process = fresh.dagster("job", "execute", "-m", "assets.definitions", "-j", "small_cache")
    assert process.returncode == 0, process.stderr[-3000:]
    assert fresh.report("vae_latents")["encoded"] == 5
    assert not list(fresh.root.rglob("*.safetensors"))
    verified = fresh.latentline("verify", "small")
    assert (verified.returncode, "0 missing or damaged" in verified.stdout) == (0, True), verified.stderr
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    entry = next(name for name in files.find("of-a-team/cache/latents") if name.endswith(".safetensors"))
    files.pipe_file(entry, files.cat_file(entry)[:-1])
    assert fresh.latentline("verify", "small").returncode == 1
    assert f"s3://{entry}" in fresh.latentline("verify", "small", "--repair").stdout
    assert "11 used in the last 30 days" in fresh.latentline("gc").stdout
    shutil.rmtree(fresh.data)  # training needs only the cache
    materialize = ("asset", "materialize", "-m", "assets.definitions", "--select", "small/trained_lora")
    trained = fresh.dagster(*materialize)
    assert trained.returncode == 0, trained.stderr[-3000:]
    assert (fresh.out / "lora" / "pytorch_lora_weights.safetensors").is_file()
