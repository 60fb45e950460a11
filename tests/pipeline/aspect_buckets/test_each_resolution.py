"""`per_image: each`: an image is used at several resolutions, from the buckets to the trained LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pipeline.aspect_buckets import checks as aspect_buckets
from pipeline.images.geometry import placement_of
from pipeline.maintenance.explain import explain
from pipeline.maintenance.forecast import forecast
from pipeline.reporting.findings import CheckContext
from pipeline.trained_lora.job import TrainingJob, read_job
from pipeline.trained_lora.stage import train_lora
from pipeline.trained_lora.worker.loop import train
from pipeline.trained_lora.worker.stop_request import StopRequest
from tests.pipeline.cached_job import Job, recipe_of

BUCKETS = {"resolutions": [64, 96], "step": 16, "per_image": "each"}


class TrainInProcess:
    """Launcher that trains in this process."""

    job: TrainingJob | None = None

    def __call__(self, module: str, file: Path) -> None:
        self.job = read_job(file)
        assert train(self.job, self, StopRequest())

    def info(self, text: str) -> None: ...

    def phase(self, text: str) -> None: ...

    def progress(self, done: int, total: int, text: str, **details: str) -> None: ...


@pytest.fixture
def job(tmp_path: Path, photos: Path, tiny_sd: Path, in_process_launch: Any) -> Job:
    training = {"steps": 10, "batch_size": 1, "sample_every": 0, "checkpoint_every": 100}
    job = Job(recipe_of(tmp_path, tiny_sd, buckets=BUCKETS, training=training), in_process_launch)
    job.run()
    return job


def test_each_image_is_cached_and_trained_at_each_resolution(job: Job) -> None:
    buckets, latents = job.tables.read("aspect_buckets"), job.tables.read("vae_latents")
    images = sorted(set(job.tables.read("validated_dataset")["sample_id"]))
    assert buckets["sample_id"].to_list() == latents["sample_id"].to_list() == sorted(images * 2)
    for sizes in placement_of(job.recipe.buckets).sets:
        samples = buckets.filter(pl.col("bucket").is_in([str(size) for size in sizes.sizes]))
        assert sorted(samples["sample_id"]) == images
    for asset in ("vae_latents", "text_embeddings"):
        assert job.failing(asset) == {}
    findings = {each.name: each for each in aspect_buckets.run(CheckContext(job.recipe, job.tables))}
    assert findings["conservation"].passed
    assert findings["shape_uniformity"].passed
    assert findings["batches_possible"].numbers["draws_per_epoch"] == 2 * len(images)

    launch = TrainInProcess()
    text = job.tables.read("text_embeddings")
    table = train_lora(job.recipe, latents, text, launch=launch, log=lambda _: None).table
    assert launch.job is not None
    epoch = launch.job.plan()[: 2 * len(images)]
    drawn_variants = [slot.variant_id for step in epoch for slot in step.slots()]
    assert sorted(drawn_variants) == sorted(
        f"{row['sample_id']} ({row['bucket']})" for row in buckets.to_dicts()
    )
    assert table["sample_id"].to_list() == images
    assert set(table["times_seen"]) == {2}
    assert table["bucket"].str.split(" ").list.n_unique().to_list() == [2] * len(images)
    assert set(table["latent_keys"].str.split(" ").explode()) == set(latents["key"])


def test_gates_and_commands_handle_each_latent_of_an_image(job: Job) -> None:
    latents = job.tables.read("vae_latents")
    missing = latents[0]
    job.tables.write("vae_latents", latents[1:])
    problems = job.failing("vae_latents")["completeness"].rows
    what = f"its latent of {missing['bucket'][0]} is in aspect_buckets but not in vae_latents"
    assert [(row["sample_id"], row["problem"]) for row in problems] == [(missing["sample_id"][0], what)]
    job.tables.write("vae_latents", latents)

    steps = explain(job.recipe, job.tables, missing["sample_id"][0])
    entries = [each.facts for each in steps if each.stage.startswith("latents entry of ")]
    assert [facts["state"] for facts in entries] == ["valid", "valid"]
    assert {facts["key"] for facts in entries} == set(latents["key"][:2])

    fewer = job.changed(buckets=BUCKETS | {"resolutions": [64], "per_image": "best"})
    expected = forecast(fewer, job.tables, log=lambda _: None)
    assert (expected.latents.there, expected.latents.to_make) == (len(latents) // 2, 0)
    more = job.changed(buckets=BUCKETS | {"resolutions": [64, 96, 128]})
    assert forecast(more, job.tables, log=lambda _: None).latents.to_make == len(latents) // 2
