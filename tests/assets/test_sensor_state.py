"""What a sensor stores between two ticks: a listing in slices, and the state that has settled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dagster import (
    DagsterInstance,
    DagsterRunStatus,
)

from assets import sensor_state
from assets.sensor_state import SensorState
from resources.run_names import RECIPE_TAG
from tests.assets.ticks import ENABLED, Ticks, empty_job, repository_of
from tests.small_recipe import small_recipe


def test_O04_O05_a_dataset_that_is_listed_in_slices_runs_once_per_settled_state(
    tmp_path: Path, instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensor_state, "SLICE_S", 0)  # one file per tick
    ticks = Ticks(tmp_path, instance)
    for name in ("a.jpg", "b.jpg", "c.jpg"):
        (tmp_path / "data" / name).write_bytes(b"1")
    listing = [f"listed {number} files so far: the next tick continues" for number in (1, 2, 3)]

    assert [ticks.evaluate() for _ in range(3)] == listing
    assert "settle" in ticks.evaluate()
    assert [ticks.evaluate() for _ in range(3)] == listing
    (tmp_path / "data" / "a.jpg").write_bytes(b"22")  # already listed, so the next listing finds it
    assert ticks.evaluate() == "run"
    assert [ticks.evaluate() for _ in range(3)] == listing
    assert "settle" in ticks.evaluate()
    assert [ticks.evaluate() for _ in range(3)] == listing
    assert ticks.evaluate() == "run"
    assert [ticks.evaluate() for _ in range(3)] == listing
    assert "nothing has changed" in ticks.evaluate()
    assert len(ticks.cursor or "") < 256


def test_a_listing_in_slices_keeps_the_folders_that_it_has_completed(
    tmp_path: Path, instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensor_state, "SLICE_S", 0)
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        (folder / "a.jpg").write_bytes(b"1")
    datasets = [{"name": folder.name, "path": folder} for folder in folders]
    ticks = Ticks(tmp_path, instance)
    ticks.repository = repository_of(small_recipe(tmp_path, datasets=datasets, recache=ENABLED))
    ticks.sensor = ticks.repository.get_sensor_def("flowers_dataset_changed")
    reasons = [ticks.evaluate() for _ in range(3)]
    assert ["listed 1 files" in reason for reason in reasons] == [True, True, False]
    first = json.loads(str(ticks.cursor))["seen"]

    # The first folder is complete when a file arrives in it: the next listing finds it.
    assert ["listed 1 files" in ticks.evaluate() for _ in range(2)] == [True, True]
    (folders[0] / "b.jpg").write_bytes(b"2")
    assert ticks.evaluate() == "run"
    assert json.loads(str(ticks.cursor))["seen"] == first
    changed = [ticks.evaluate() for _ in range(4)]
    assert "changing" in changed[-1]


def test_the_cursor_of_an_earlier_version_is_read(tmp_path: Path, instance: DagsterInstance) -> None:
    ticks = Ticks(tmp_path, instance)
    ticks.cursor = '{"seen": "0123456789abcdef", "handled": "0123456789abcdef"}'
    assert "settle" in ticks.evaluate()
    assert ticks.evaluate() == "run"


@pytest.mark.parametrize(
    "cursor",
    [
        '{"fingerprint": "0123456789abcdef"}',
        '{"position": {"folder": 3}}',
        '{"position": 3}',
        "[]",
        "run 3",
        '{"observed": null}',
        '{"listed": null}',
        '{"since": "now"}',
    ],
)
def test_a_cursor_of_another_version_counts_as_none(cursor: str) -> None:
    assert SensorState.from_cursor(cursor) == SensorState() == SensorState.from_cursor(None)


def test_O06_files_that_return_to_an_older_state_run_again() -> None:
    state, requested = SensorState(), list[str]()
    for now in ["one", "one", "two", "two", "one", "one", "one"]:
        state, reason = state.settle(now, now=0.0)
        if reason is None:
            state, reason = state.after_runs(succeeded=None, failed=[], now=0.0)
            assert reason is None
            requested.append(now)
            state, _ = state.after_runs(succeeded="a run", failed=[], now=0.0)
    assert requested == ["one", "two", "one"]


def test_a_change_that_is_reverted_before_it_settles_runs_nothing() -> None:
    state = SensorState("one", "one")
    state, _ = state.settle("two", now=1.0)
    state, reason = state.settle("one", now=2.0)
    assert reason is not None
    assert (state.seen, state.handled) == ("one", "one")


def test_while_a_run_is_in_progress_the_next_listing_starts_at_the_first_file(
    tmp_path: Path, instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that change before the end of the run are then seen."""
    monkeypatch.setattr(sensor_state, "SLICE_S", 0)  # one file per tick
    ticks = Ticks(tmp_path, instance)
    (tmp_path / "data" / "a.jpg").write_bytes(b"1")
    assert "listed 1 files" in ticks.evaluate()
    assert "settle" in ticks.evaluate()
    run = instance.create_run_for_job(
        empty_job, status=DagsterRunStatus.STARTED, tags={RECIPE_TAG: "flowers"}
    )
    assert "listed 1 files" in ticks.evaluate()
    assert run.run_id in ticks.evaluate()
    assert json.loads(str(ticks.cursor))["position"] is None
