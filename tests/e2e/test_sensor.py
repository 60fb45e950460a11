"""The sensor in Dagster's real daemon while files arrive."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
from dagster import DagsterInstance
from dagster._core.scheduler.instigation import InstigatorTick, TickStatus

from demo.tiny_models.captioners import write_blip2
from tests.e2e.daemon import make_home, running, runs_of, succeeded, until

NUM_ARRIVING = 8
ARRIVE_EVERY_S = 2.0
"""Shorter than the 5 s between two ticks, so that each tick finds other files."""

UNCHANGED = re.compile("nothing has changed since (the last run|run [0-9a-f-]{36})")


def ticks_of(instance: DagsterInstance) -> list[InstigatorTick]:
    """Return the finished ticks of the recipe's sensor, the oldest first."""
    states = [each for each in instance.all_instigator_state() if each.instigator_name != "dead_runs"]
    if not states:
        return []
    (state,) = states
    ticks = instance.get_ticks(state.instigator_origin_id, state.selector_id)
    return [tick for tick in reversed(ticks) if tick.status != TickStatus.STARTED]


def more_ticks(instance: DagsterInstance, number: int) -> tuple[int, int]:
    """Return the number of ticks now and after `number` more."""
    count = len(ticks_of(instance))
    return count, count + number


def overlapping(instance: DagsterInstance) -> list[str]:
    records = sorted(instance.get_run_records(), key=lambda record: record.start_time or 0.0)
    pairs = itertools.pairwise(records)
    return [two.dagster_run.run_id for one, two in pairs if (one.end_time or 0.0) > (two.start_time or 0.0)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_O05_O06_settled_and_reverted_files_run_once_each_and_unchanged_files_never(
    cached, tmp_path: Path
) -> None:
    """The daemon also runs if another recipe is broken."""
    cached.recipe(recache={"cron": None, "on_change": True, "enabled": True, "settle_s": 5})
    (cached.file.parent / "bad.yaml").write_text("datasets: [\n", encoding="utf-8")
    home, log = make_home(tmp_path / "home"), tmp_path / "daemon.log"
    arrived: list[datetime] = []
    stop = threading.Event()

    def arrive() -> None:
        for index in range(NUM_ARRIVING):
            # The caption is unique, because of equal images with equal captions all but one are rejected.
            (cached.data / f"new{index}.txt").write_text(f"new photograph {index}")
            shutil.copy(cached.data / "photo0.png", cached.data / f"new{index}.png")
            arrived.append(datetime.now(tz=UTC))
            if stop.wait(ARRIVE_EVERY_S):
                return

    command = [sys.executable, "-m", "dagster._daemon", "run", "-m", "assets.definitions"]
    environment = {**cached.environment(), "DAGSTER_HOME": str(home)}
    with (
        DagsterInstance.from_config(str(home)) as instance,
        running(command, environment=environment, cwd=tmp_path, log=log),
    ):
        until(lambda: succeeded(instance, 1), "the run of the first state", seconds=120, log=log)

        writer = threading.Thread(target=arrive)
        writer.start()
        try:
            until(lambda: succeeded(instance, 2), "a run after files arrived", seconds=120, log=log)
        finally:
            stop.set()
            writer.join()
        assert len(arrived) == NUM_ARRIVING
        requested = instance.get_run_records()[0].create_timestamp
        assert requested > arrived[-1], "the sensor requested a run while files were still arriving"
        assert cached.report("vae_latents")["samples"] == 5 + NUM_ARRIVING

        before, after = more_ticks(instance, 3)
        until(lambda: len(ticks_of(instance)) >= after, "three ticks", seconds=180, log=log)
        reasons = [tick.skip_reason or "" for tick in ticks_of(instance)[before:]]
        assert all(UNCHANGED.fullmatch(reason) for reason in reasons), reasons
        assert len(runs_of(instance)) == 2

        for path in cached.data.glob("new*"):
            path.unlink()
        until(lambda: succeeded(instance, 3), "a run after the files were removed", seconds=120, log=log)
        assert cached.report("vae_latents")["samples"] == 5
        before, after = more_ticks(instance, 2)
        until(lambda: len(ticks_of(instance)) >= after, "two ticks", seconds=180, log=log)
        assert len(runs_of(instance)) == 3
        assert overlapping(instance) == []

        reasons = [tick.skip_reason or "" for tick in ticks_of(instance)]
        settling = re.compile(
            r"files or recipe are changing \(state [0-9a-f]{16}\): waiting until they settle"
        )
        assert any(settling.fullmatch(reason) for reason in reasons), reasons
    assert "recipe bad is excluded" in log.read_text("utf-8")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "recache",
    [{"cron": None, "on_change": True, "settle_s": 5}, {"cron": "* * * * *", "on_change": False}],
    ids=["sensor", "schedule"],
)
def test_without_a_reload_a_run_has_the_steps_of_the_edited_recipe(
    cached, tmp_path: Path, recache: dict[str, object]
) -> None:
    """The code server, which is not reloaded, has a job without the asset captions."""
    cached.recipe(recache={**recache, "enabled": True})
    write_blip2(tmp_path / "captioner")
    home, log, socket = make_home(tmp_path / "home"), tmp_path / "daemon.log", tmp_path / "socket"
    environment = {**cached.environment(), "DAGSTER_HOME": str(home)}
    location = {"host": "localhost", "socket": str(socket), "location_name": "latentline"}
    workspace = tmp_path / "workspace.yaml"
    workspace.write_text(json.dumps({"load_from": [{"grpc_server": location}]}), encoding="utf-8")
    server = cached.command("api", "grpc", "-m", "assets.definitions", "--socket", str(socket))
    daemon = [sys.executable, "-m", "dagster._daemon", "run", "-w", str(workspace)]
    with (
        DagsterInstance.from_config(str(home)) as instance,
        running(server, environment=environment, cwd=tmp_path, log=tmp_path / "server.log"),
    ):
        until(socket.exists, "the code server", seconds=120, log=tmp_path / "server.log")
        captions = {"from": "model", "model": str(tmp_path / "captioner")}
        dataset = {"name": "photos", "path": str(cached.data), "captions": captions}
        cached.recipe(recache={**recache, "enabled": True}, datasets=[dataset])
        with running(daemon, environment=environment, cwd=tmp_path, log=log):
            until(lambda: succeeded(instance, 1), "a run", seconds=240, log=log)
        (run,) = runs_of(instance)
        assert "small__captions" in {stats.step_key for stats in instance.get_run_step_stats(run.run_id)}
