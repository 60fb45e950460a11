"""One broken recipe among three: Dagster's real daemon and commands run everything of the other two."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from dagster import DagsterInstance, DagsterRunStatus

from tests.e2e.daemon import make_home, running, runs_of, until
from tests.e2e.problems import problem_of

BROKEN = """\
datasets: [{name: photos, path: data/x}]
output_dir: outputs/bad
model: {base: models/tiny-sd}
training: {stepz: 3}
recache: {cron: "* * * * *", enabled: true}
"""

STARTS_S = 600.0
"""Seconds in which the daemon starts a run by the schedule, which fires each minute, or by the sensor."""


def add_recipes(workspace: Any) -> None:
    """Write the recipes `clock` with a schedule, `watch` with a sensor, and `bad`, which is broken."""
    workspace.recipe()
    values = json.loads(workspace.file.read_text("utf-8"))
    workspace.file.unlink()
    automations = {
        "clock": {"cron": "* * * * *", "on_change": False, "enabled": True},
        "watch": {"cron": None, "on_change": True, "enabled": True, "settle_s": 5},
    }
    for name, recache in automations.items():
        output_dir = workspace.root / f"out-{name}"
        shutil.copytree(workspace.out, output_dir)
        recipe = {**values, "output_dir": str(output_dir), "recache": recache}
        (workspace.file.parent / f"{name}.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    (workspace.file.parent / "bad.yaml").write_text(BROKEN, encoding="utf-8")


def statuses(instance: DagsterInstance) -> Counter[tuple[str, DagsterRunStatus]]:
    """Return the number of runs by job and status."""
    return Counter((run.job_name, run.status) for run in runs_of(instance))


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_with_one_broken_recipe_of_three_the_daemon_runs_schedule_and_sensor_of_the_others(
    cached: Any, tmp_path: Path
) -> None:
    add_recipes(cached)
    home, log = make_home(tmp_path / "home"), tmp_path / "daemon.log"
    command = [sys.executable, "-m", "dagster._daemon", "run", "-m", "assets.definitions"]
    environment = {**cached.environment(), "DAGSTER_HOME": str(home)}
    by_schedule = ("clock_cache", DagsterRunStatus.SUCCESS)
    by_sensor = ("watch_cache", DagsterRunStatus.SUCCESS)
    with (
        DagsterInstance.from_config(str(home)) as instance,
        running(command, environment=environment, cwd=tmp_path, log=log),
    ):
        # Both start with the files that are there.
        for expected in (by_schedule, by_sensor):
            until(lambda e=expected: statuses(instance)[e], str(expected), seconds=STARTS_S, log=log)

        # The sensor reacts to a new image, although the recipe next to it is broken.
        (cached.data / "new.txt").write_text("a new photograph", encoding="utf-8")
        shutil.copy(cached.data / "photo0.png", cached.data / "new.png")
        until(
            lambda: statuses(instance)[by_sensor] == 2,
            "a second run of the sensor",
            seconds=STARTS_S,
            log=log,
        )

        tags = {run.job_name: run.tags for run in runs_of(instance)}
        assert tags["clock_cache"]["dagster/schedule_name"] == "clock_recache"
        assert tags["watch_cache"]["dagster/sensor_name"] == "watch_dataset_changed"
        assert not [name for name, _ in statuses(instance) if name.startswith("bad")]

    warnings = [line for line in log.read_text("utf-8").splitlines() if "recipe bad is excluded" in line]
    assert warnings, "the daemon's log names the broken recipe"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_one_broken_recipe_of_three_only_its_own_job_fails_with_its_error(cached: Any) -> None:
    add_recipes(cached)

    def execute(job: str) -> Any:
        return cached.dagster("job", "execute", "-m", "assets.definitions", "-j", job)

    problem = problem_of(execute("bad_train"))
    assert problem.what.startswith("RecipeError: ")
    assert "unknown key stepz" in problem.what
    assert f"{cached.file.parent / 'bad.yaml'}:4" in problem.where
    assert "steps" in problem.fix

    for name in ("clock", "watch"):
        completed = execute(f"{name}_train")
        assert completed.returncode == 0, completed.stderr[-3000:]
        assert (cached.root / f"out-{name}" / "lora" / "pytorch_lora_weights.safetensors").is_file()
