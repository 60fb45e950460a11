"""The forecast of a cache job agrees with what the job then does."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.aspect_buckets.stage import assign_buckets
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.encoding.speed import record_speed, recorded_speed
from pipeline.maintenance.forecast import Forecast, forecast
from pipeline.raw_images.stage import scan
from pipeline.text_embeddings.stage import cache_text
from pipeline.trained_lora.stage import plan_run
from pipeline.vae_latents.stage import cache_latents
from pipeline.validated_dataset.stage import validate
from tests.pipeline.cached_job import Job, recipe_of


def plan(job: Job) -> Forecast:
    return forecast(job.recipe, job.tables, log=str)


def reasons(planned: Forecast) -> dict[str, dict[str, list[str]]]:
    return {"latents": dict(planned.latents.reasons), "text": dict(planned.text.reasons)}


def run(job: Job) -> dict[str, dict[str, int]]:
    """Run the cache job and return the counters of its two cache stages."""
    raw = job.keep("raw_images", scan(job.recipe, job.tables, log=str)).table
    valid = job.keep("validated_dataset", validate(job.recipe, raw, job.tables, log=str)).table
    buckets = job.keep("aspect_buckets", assign_buckets(job.recipe, valid, log=str)).table
    launch: dict[str, Any] = {"launch": job.launch, "log": str}
    results = {
        "latents": job.keep("vae_latents", cache_latents(job.recipe, buckets, job.tables, **launch)),
        "text": job.keep("text_embeddings", cache_text(job.recipe, valid, job.tables, **launch)),
    }
    counters = ("encoded", "reused", "damaged")
    return {kind: {name: result.report[name] for name in counters} for kind, result in results.items()}


def forecast_and_run(job: Job) -> Forecast:
    """Return the forecast, after asserting that the job did exactly that."""
    planned = plan(job)
    counters = run(job)
    for kind, expected in (("latents", planned.latents), ("text", planned.text)):
        assert counters[kind]["encoded"] == expected.to_make
        assert counters[kind]["reused"] == expected.there
    assert plan(job).latents.to_make == plan(job).text.to_make == 0
    return planned


def photo(job: Job, name: str = "cat.png") -> Path:
    return job.recipe.datasets[0].path / name


def edit(job: Job) -> None:
    with Image.open(photo(job)) as image:
        flipped = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    flipped.save(photo(job))


def add(job: Job) -> None:
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8)).save(
        photo(job, "new.png")
    )
    photo(job, "new.txt").write_text("something new")


def rename(job: Job) -> None:
    for suffix in ("png", "txt"):
        photo(job, f"cat.{suffix}").rename(photo(job, f"renamed.{suffix}"))


def move(job: Job) -> None:
    photo(job, "below").mkdir()
    for suffix in ("png", "txt"):
        photo(job, f"cat.{suffix}").rename(photo(job, f"below/cat.{suffix}"))


def remove(job: Job) -> None:
    photo(job).unlink()
    photo(job, "cat.txt").unlink()


def recaption(job: Job) -> None:
    photo(job, "cat.txt").write_text("another caption")


def other_buckets(job: Job) -> None:
    job.recipe = recipe_of(
        photo(job).parents[1], job.recipe.model.base, buckets={"resolution": 48, "step": 16}
    )


def other_dtype(job: Job) -> None:
    job.recipe = recipe_of(photo(job).parents[1], job.recipe.model.base, latents={"dtype": "float32"})


def other_vae(job: Job) -> None:
    folder = photo(job).parents[1] / "other model"
    shutil.copytree(job.recipe.model.base, folder)
    config = folder / "vae" / "config.json"
    config.write_text(config.read_text().replace('"scaling_factor": 0.18215', '"scaling_factor": 0.2'))
    job.recipe = recipe_of(photo(job).parents[1], folder)


def damage(job: Job) -> None:
    job.entry("vae_latents").write_bytes(b"torn")


def lose(job: Job) -> None:
    job.entry("text_embeddings").unlink()


CAT, ALL = (
    ["photos/cat.png"],
    [f"photos/{name}.png" for name in ("astronaut", "camera", "cat", "coffee", "rocket")],
)


@pytest.mark.parametrize(
    ("change", "latents", "text"),
    [
        (add, {"new image": ["photos/new.png"]}, {"new caption": ["photos/new.png"]}),
        (edit, {"image changed": CAT}, {}),
        (remove, {}, {}),
        pytest.param(rename, {}, {}, marks=pytest.mark.slow),
        pytest.param(move, {}, {}, marks=pytest.mark.slow),
        (recaption, {}, {"caption changed": CAT}),
        (other_buckets, {"geometry changed": ALL}, {}),
        (other_dtype, {"dtype changed": ALL}, {}),
        (other_vae, {"VAE changed": ALL}, {}),
        (damage, {"entry damaged": CAT}, {}),
        (lose, {}, {"entry missing": CAT}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_L04_each_reason_is_named_and_the_job_agrees_with_the_forecast(
    job: Job, change: Callable[[Job], None], latents: dict[str, list[str]], text: dict[str, list[str]]
) -> None:
    change(job)
    planned = forecast_and_run(job)
    assert reasons(planned) == {"latents": latents, "text": text}
    is_removed = change in (remove, rename, move)
    assert list(planned.gone) == (CAT if is_removed else [])


def test_a_forecast_writes_and_encodes_nothing(job: Job) -> None:
    add(job)
    plan(job)  # hashes the weights of the denoiser, which are recorded once
    root = photo(job).parents[1]
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    assert plan(job).latents.to_make == 1
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_bytes_and_seconds_cover_the_missing_entries(job: Job) -> None:
    assert plan(job).latents.seconds == 0
    shutil.rmtree(job.recipe.cache_dir / "latents")
    planned = plan(job).latents
    assert planned.seconds is not None
    assert planned.seconds > 0
    record_speed(job.recipe.cache_dir, "start of latents", 60.0)
    assert plan(job).latents.seconds == pytest.approx(60 + planned.seconds, abs=30)
    run(job)
    startup_s = recorded_speed(job.recipe.cache_dir, "start of latents")
    assert startup_s is None or startup_s < 60, "measured again, or too short for a record"
    assert planned.num_bytes == sum(
        path.stat().st_size for path in (job.recipe.cache_dir / "latents").rglob("*.safetensors")
    )
    shutil.rmtree(job.recipe.cache_dir)
    assert plan(job).latents.seconds is None, "nothing was measured for this cache"


def test_rejected_images_are_counted_by_reason(job: Job) -> None:
    photo(job, "empty.png").write_bytes(b"")
    photo(job, "empty.txt").write_text("nothing")
    planned = plan(job)
    assert (planned.samples, dict(planned.rejected)) == (5, {"empty_file": 1})


def test_only_the_closed_gates_of_the_first_asset_are_reported(job: Job) -> None:
    assert plan(job).closed == []
    caption = photo(job, "cat.txt")
    text = caption.read_text(encoding="utf-8")
    caption.unlink()
    closed = {gate.name: gate for gate in plan(job).closed}
    assert set(closed) == {"captions_present", "rejected_fraction"}
    assert {gate.asset for gate in closed.values()} == {"validated_dataset"}
    assert "there is no cat.txt" in closed["captions_present"].summary
    assert "write cat.txt" in closed["captions_present"].fix
    caption.write_text(text, encoding="utf-8")
    assert plan(job).closed == []
    for each in list(photo(job).parent.iterdir()):
        each.unlink()
    assert [(gate.asset, gate.name) for gate in plan(job).closed] == [("raw_images", "images_found")]


def test_warnings_are_those_of_the_checks_after_the_job(job: Job) -> None:
    first = photo(job, "cat.txt").read_text("utf-8")
    for text in photo(job).parent.glob("*.txt"):
        text.write_text(first, "utf-8")
    photo(job, "camera.txt").write_text(" ".join(["a long caption about a camera"] * 20), "utf-8")
    training = {"sample_prompts": ["a house"]}
    captions = {"trigger": "sks", "suffix": [".txt"]}
    datasets = [{"name": "photos", "path": str(photo(job).parent), "captions": captions}]
    job.recipe = job.changed(training=training, datasets=datasets)

    before = plan(job)
    assert before.unknown_lengths == 5
    early = {(each.asset, each.name) for each in before.warnings}
    assert early == {("validated_dataset", "captions_repeated"), ("text_embeddings", "previews_name_trigger")}

    run(job)
    after = plan(job)
    assert after.unknown_lengths == 0
    expected = {name: each.summary for name, each in job.failing("text_embeddings").items()}
    assert set(expected) == {"captions_fit", "previews_name_trigger"}
    assert {each.name: each.summary for each in after.warnings if each.asset == "text_embeddings"} == expected
    assert all(each.fix for each in after.warnings)


def test_the_run_of_a_forecast_is_the_run_that_the_tables_of_the_job_give(job: Job) -> None:
    recaption(job)
    planned = plan(job).training
    assert planned is not None
    assert (planned.action.kind, planned.num_inputs, planned.duration) == ("new", 5, None)
    run(job)
    latents, text = job.tables.read("vae_latents"), job.tables.read("text_embeddings")
    assert plan_run(RecipeEntries(job.recipe), latents, text, log=str)[0].run == planned.action.run
    photo(job, "cat.txt").unlink()
    assert plan(job).training is None, "a gate would close"


def test_a_forecast_does_not_log_numbers_of_the_last_run(job: Job) -> None:
    photo(job).write_bytes(b"")
    log: list[str] = []
    forecast(job.recipe, job.tables, log=log.append)
    assert not [line for line in log if "rejected" in line]
