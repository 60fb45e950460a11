"""A closed gate stops everything downstream, names its cause, and makes the exit status non-zero."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from dagster import AssetKey, AssetSelection, ExecuteInProcessResult


def key(asset: str) -> AssetKey:
    return AssetKey(["small", asset])


def steps_started(result: ExecuteInProcessResult) -> set[str]:
    return {str(event.step_key) for event in result.all_events if event.is_step_start}


def first_entry(workspace, kind: str) -> Path:
    return workspace.entries(kind)[0]


def test_L02_L06_a_truncated_latent_closes_the_gate_of_a_check_that_runs_alone(cached) -> None:
    entry = first_entry(cached, "latents")
    entry.write_bytes(entry.read_bytes()[:-7])
    result = cached.select(AssetSelection.checks_for_assets(key("vae_latents")))
    assert not result.success
    assert steps_started(result) == {"small__vae_latents"}
    assert result.get_asset_materialization_events() == [], "the asset is not materialized"
    evaluations = {e.check_name: e for e in result.get_asset_check_evaluations() if not e.passed}
    assert entry.name in str(evaluations["file_size_outliers"].metadata["rows"].value)
    report = cached.report("vae_latents_checks")
    assert {check["name"] for check in report["checks"] if check["closed"]} == evaluations.keys()
    assert report["gates_closed"] == len(evaluations)


def test_O10_training_alone_fails_on_a_damaged_cache_before_it_starts_a_run(cached) -> None:
    entry = first_entry(cached, "latents")
    entry.write_bytes(entry.read_bytes()[:-7])
    result = cached.select(AssetSelection.assets(key("trained_lora")).without_checks())
    assert not result.success
    assert not (cached.out / "lora").exists()
    assert not list((cached.out / "runs").glob("*/checkpoints/*"))
    [failure] = result.get_step_failure_events()
    text = str(failure.step_failure_data.user_failure_data.description)
    assert text.startswith("GateClosedError: ")
    assert entry.name in text


def test_O10_B01_training_alone_fails_if_no_bucket_fills_a_batch(cached) -> None:
    cached.recipe(
        buckets={"resolution": 64, "step": 8, "max_aspect_ratio": 2.0, "underfilled": "drop"},
        training={"steps": 4, "batch_size": 64, "sample_every": 0},
    )
    result = cached.select(AssetSelection.assets(key("trained_lora")))
    assert not result.success
    [failure] = result.get_step_failure_events()
    assert "batches_possible" in str(failure.step_failure_data.user_failure_data.description)
    assert not (cached.out / "runs").exists()


@pytest.mark.slow
def test_O10_training_fails_in_a_selection_that_starts_after_a_closed_gate(cached) -> None:
    (cached.data / "photo1.txt").unlink()
    cached.recipe(checks={"max_rejected_fraction": 0.5})
    result = cached.execute("cache")
    assert not result.success
    result = cached.select(AssetSelection.assets(key("aspect_buckets")).downstream())
    assert not result.success
    [failure] = result.get_step_failure_events()
    assert failure.step_key == "small__trained_lora"
    assert "captions_present" in str(failure.step_failure_data.user_failure_data.description)
    assert not (cached.out / "runs").exists()


def test_O01_a_closed_gate_stops_everything_downstream_after_its_table_is_written(cached) -> None:
    (cached.data / "photo1.txt").unlink()
    result = cached.execute("train")
    assert not result.success
    started = steps_started(result)
    assert "small__validated_dataset" in started
    assert not {step for step in started if "latents" in step or "text" in step or "lora" in step}
    table = pl.read_parquet(cached.out / "tables" / "rejected.parquet")
    assert "photos/photo1.png" in table["sample_id"].to_list()
    # Later stages did not write it, so the stage with the gate has.
    page = (cached.out / "reports" / "index.html").read_text("utf-8")
    assert "gates closed" in page or "1 gate closed" in page
    assert "photos/photo1.png" in page


def test_a_gate_that_the_recipe_allows_only_warns(cached) -> None:
    (cached.data / "photo1.txt").unlink()
    cached.recipe(checks={"max_rejected_fraction": 0.5, "allow": ["captions_present"]})
    result = cached.execute("cache")
    assert result.success
    evaluations = {(e.asset_key, e.check_name): e for e in result.get_asset_check_evaluations()}
    evaluation = evaluations[key("validated_dataset"), "captions_present"]
    assert (evaluation.passed, evaluation.severity.value) == (False, "WARN")
    assert cached.report("vae_latents")["samples"] == 4
    assert "4 images kept, 1 rejected" in (cached.out / "reports" / "index.html").read_text("utf-8")


def test_I08_filters_that_reject_every_image_fail_the_job_before_any_launch(fresh) -> None:
    dataset = {"name": "photos", "path": str(fresh.data), "filters": {"min_width": 5000}}
    fresh.recipe(datasets=[dataset])
    result = fresh.execute("train")
    assert not result.success
    assert steps_started(result) == {"small__raw_images", "small__validated_dataset"}
    checks = fresh.report("validated_dataset_checks")["checks"]
    gate = {check["name"]: check for check in checks}["rejected_fraction"]
    assert gate["closed"]
    assert "no samples are left of 5 images: 5 filter_min_width" in gate["summary"]
    assert "change filters.min_width of dataset photos, now 5000" in gate["fix"]
    assert not list(fresh.cache.rglob("*.safetensors"))
