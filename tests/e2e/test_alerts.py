"""The alerts of Dagster's real daemon."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from dagster import DagsterInstance, job

from resources.run_names import RECIPE_TAG
from tests.e2e.daemon import make_home, running, until
from tests.webhook_server import webhook_server


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_failed_run_is_sent_if_its_retry_is_impossible(cached, tmp_path: Path) -> None:
    """Its recipe was removed or renamed since the run began."""
    cached.recipe(recache={"enabled": False})
    home, log = make_home(tmp_path / "home"), tmp_path / "daemon.log"
    command = [sys.executable, "-m", "dagster._daemon", "run", "-m", "assets.definitions"]

    @job
    def flowers_gone() -> None:
        pass

    with (
        webhook_server() as server,
        DagsterInstance.from_config(str(home)) as instance,
        running(
            command,
            environment={**cached.environment(), "DAGSTER_HOME": str(home), "LATENTLINE_WEBHOOK": server.url},
            cwd=tmp_path,
            log=log,
        ),
    ):

        def sensor() -> object:
            states = {each.instigator_name: each for each in instance.all_instigator_state()}
            state = states.get("failure_alerts")
            return state if state is not None and state.instigator_data.cursor is not None else None

        until(sensor, "the first tick of the sensor", seconds=120, log=log)
        repository = sensor().origin.repository_origin
        gone = instance.create_run_for_job(
            flowers_gone,
            tags={RECIPE_TAG: "flowers"},
            remote_job_origin=repository.get_job_origin("flowers_gone"),
        )
        instance.report_run_failed(gone, "its process 7 ended without reporting it")
        assert instance.get_run_by_id(gone.run_id).tags["dagster/will_retry"] == "true"
        until(lambda: server.bodies, "the alert", seconds=120, log=log)
        assert [body["run_id"] for body in server.bodies] == [gone.run_id]
        assert server.bodies[0]["problems"][0]["what"] == "its process 7 ended without reporting it"
