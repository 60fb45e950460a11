"""Observations of a training that is still running, from a real job with a real worker process."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from dagster import AssetKey, DagsterInstance, EventLogRecord

KEY = AssetKey(["small", "trained_lora"])

TRAINING = {
    "steps": 4,
    "batch_size": 2,
    "checkpoint_every": 2,
    "sample_every": 4,
    "sample_prompts": ["a red cat"],
    "lora": {"rank": 2, "alpha": 2.0},
}


@dataclass
class FirstObservation:
    """What a reader of the event log sees when the first observation is there."""

    found: bool = False
    is_materialized: bool = False


def watch(instance: DagsterInstance, seen: FirstObservation, stop: threading.Event) -> None:
    while not stop.wait(0.1):
        if instance.fetch_observations(KEY, limit=1).records:
            seen.is_materialized = instance.get_latest_materialization_event(KEY) is not None
            seen.found = True
            return


def observations(instance: DagsterInstance) -> list[EventLogRecord]:
    """Return the observations, the oldest first."""
    return list(instance.fetch_observations(KEY, limit=100, ascending=True).records)


def numbers(record: EventLogRecord) -> dict[str, object]:
    assert record.asset_observation is not None
    return {name: value.value for name, value in record.asset_observation.metadata.items()}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_running_training_reports_observations_and_no_materialization(cached, tmp_path: Path) -> None:
    cached.recipe(training=TRAINING)
    home = tmp_path / "home"
    home.mkdir()
    with DagsterInstance.local_temp(str(home)) as instance:
        seen, stop = FirstObservation(), threading.Event()
        watcher = threading.Thread(target=watch, args=(instance, seen, stop))
        watcher.start()
        try:
            result = cached.execute("train", instance)
        finally:
            stop.set()
            watcher.join()
        assert result.success
        assert seen == FirstObservation(found=True, is_materialized=False)

        records = observations(instance)
        (materialization,) = instance.fetch_materializations(KEY, limit=10).records
        assert max(record.storage_id for record in records) < materialization.storage_id

        # The pictures are drawn before the first step and after the last one.
        pictures = [numbers(record)["previews"] for record in records if "previews" in numbers(record)]
        assert len(pictures) in (1, 2), "the second may be drawn within the shortest interval"
        starts = {str(picture).partition(",")[0] for picture in pictures}
        assert starts == {"![previews](data:image/jpeg;base64"}

        last = numbers(records[-1])
        assert (last["step"], last["steps"]) == (4, 4)

        # An observation of pictures or a checkpoint without new steps has no loss.
        trained = [numbers(record) for record in records if "loss" in numbers(record)][-1]
        assert {name for name, value in trained.items() if isinstance(value, float)} >= {
            "loss",
            "learning_rate",
            "steps_per_second",
            "samples_per_second",
        }
        assert last["dagster_run"] == result.run_id

        # Neither the runs nor the sensor of the recipe react to observations.
        assert [run.run_id for run in instance.get_runs()] == [result.run_id]
        messages = [entry.user_message for entry in instance.all_logs(result.run_id)]
        assert "starting 1 training process" in messages
        assert "\ntraining: step 4 of 4, " in "\n".join(messages)
