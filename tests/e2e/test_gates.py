"""A closed gate stops training, says why, and gives an exit status that CI believes."""

from __future__ import annotations

from pathlib import Path

import polars as pl
from dagster import AssetKey, AssetSelection, ExecuteInProcessResult

from tests.e2e.words import refused


def key(asset: str) -> AssetKey:
    return AssetKey(["small", asset])


def steps_started(result: ExecuteInProcessResult) -> set[str]:
    return {str(event.step_key) for event in result.all_events if event.is_step_start}


def first_entry(workspace, kind: str) -> Path:
    return workspace.entries(kind)[0]


def test_L06_a_latent_cut_short_is_made_again_by_the_next_run(cached) -> None:
    entry = first_entry(cached, "latents")
    whole = entry.read_bytes()
    entry.write_bytes(whole[:-7])
    assert cached.execute("cache").success
    assert cached.report("vae_latents")["encoded"] == 1
    assert entry.read_bytes() == whole


def test_L06_with_the_check_alone_a_latent_cut_short_closes_the_gate(cached) -> None:
    entry = first_entry(cached, "latents")
    entry.write_bytes(entry.read_bytes()[:-7])
    result = cached.select(AssetSelection.checks_for_assets(key("vae_latents")))
    assert not result.success
    assert steps_started(result) == {"small__vae_latents"}
    assert result.get_asset_materialization_events() == [], "the asset itself is left as it is"
    failed = {e.check_name for e in result.get_asset_check_evaluations() if not e.passed}
    assert "file_size_outliers" in failed
    said = cached.report("vae_latents_checks")
    assert {each["name"] for each in said["checks"] if each["closed"]} == failed
    assert said["gates_closed"] == len(failed)


def test_O10_training_alone_refuses_a_damaged_cache_and_starts_no_run(cached) -> None:
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


def test_O10_B01_training_alone_refuses_batches_that_its_buckets_do_not_fill(cached) -> None:
    cached.recipe(
        buckets={"resolution": 64, "step": 8, "max_aspect_ratio": 2.0, "underfilled": "drop"},
        training={"steps": 4, "batch_size": 64, "sample_every": 0},
    )
    result = cached.select(AssetSelection.assets(key("trained_lora")))
    assert not result.success
    [failure] = result.get_step_failure_events()
    assert "batches_possible" in str(failure.step_failure_data.user_failure_data.description)
    assert not (cached.out / "runs").exists()


def test_O10_a_selection_that_begins_after_a_closed_gate_is_not_trained_on(cached) -> None:
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


def test_L02_a_padded_entry_is_named_by_the_file_size_check(cached) -> None:
    entry = first_entry(cached, "latents")
    with entry.open("ab") as file:
        file.write(b"\0" * 64)
    result = cached.select(AssetSelection.checks_for_assets(key("vae_latents")))
    [evaluation] = [e for e in result.get_asset_check_evaluations() if e.check_name == "file_size_outliers"]
    assert not evaluation.passed
    assert entry.name in str(evaluation.metadata["rows"].value)


def test_O01_a_closed_gate_stops_everything_downstream_and_its_table_can_be_seen(cached) -> None:
    (cached.data / "photo1.txt").unlink()
    result = cached.execute("train")
    assert not result.success
    started = steps_started(result)
    assert "small__validated_dataset" in started
    assert not {step for step in started if "latents" in step or "text" in step or "lora" in step}
    table = pl.read_parquet(cached.out / "tables" / "rejected.parquet")
    assert "photos/photo1.png" in table["sample_id"].to_list()


def test_a_gate_that_the_recipe_allows_warns_and_lets_the_rest_through(cached) -> None:
    (cached.data / "photo1.txt").unlink()
    cached.recipe(checks={"max_rejected_fraction": 0.5, "allow": ["captions_present"]})
    result = cached.execute("cache")
    assert result.success
    evaluations = {(e.asset_key, e.check_name): e for e in result.get_asset_check_evaluations()}
    evaluation = evaluations[key("validated_dataset"), "captions_present"]
    assert (evaluation.passed, evaluation.severity.value) == (False, "WARN")
    assert cached.report("vae_latents")["samples"] == 4


def test_I08_filters_that_leave_nothing_end_the_job_before_any_process_and_are_named(fresh) -> None:
    dataset = {"name": "photos", "path": str(fresh.data), "filters": {"min_width": 5000}}
    fresh.recipe(datasets=[dataset])
    done = fresh.dagster("job", "execute", "-m", "assets.definitions", "-j", "small_train")
    words = refused(done)
    assert "rejected_fraction: no samples are left of 5 images: 5 filter_min_width" in words.what
    assert "change filters.min_width of the dataset photos, which is 5000" in words.fix
    assert "pipeline.processes" not in done.stderr
    assert not (fresh.out / "reports" / "text_embeddings.json").exists()
    assert not list(fresh.cache.rglob("*.safetensors"))


def test_O02_on_the_command_line_a_closed_gate_is_a_status_and_ends_in_what_where_fix(cached) -> None:
    (cached.data / "photo1.txt").unlink()
    done = cached.dagster("job", "execute", "-m", "assets.definitions", "-j", "small_train")
    assert done.returncode != 0
    last = done.stderr[done.stderr.rindex("\nGateClosedError: ") :]
    assert "captions_present" in last
    assert "photo1" in last
    assert "  fix:   " in last
    assert "Traceback" not in last
    assert not (cached.out / "lora").exists()
