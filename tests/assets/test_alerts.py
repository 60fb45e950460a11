"""Alerts of real runs, received by a real web server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dagster import (
    AssetCheckKey,
    AssetKey,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    JobDefinition,
    build_sensor_context,
    job,
    op,
)
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.execution.api import execute_run

from assets.alerts import RETRY_WAIT_S, failure_alert, is_retried, warning_alert
from assets.definitions import build_definitions
from pipeline.errors import RecipeError
from pipeline.recipe import BrokenRecipe, Recipe
from resources.run_names import ATTEMPT_TAG, RECIPE_TAG
from resources.run_summary import summarize_run
from tests.assets.nightly_job import JOB, Location, recipe_with_images
from tests.webhook_server import Received, webhook_server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Received]:
    with webhook_server() as received:
        monkeypatch.setenv("LATENTLINE_WEBHOOK", received.url)
        yield received


@pytest.fixture
def recipe(tmp_path: Path, tiny_sd: Path) -> Recipe:
    return recipe_with_images(tmp_path, tiny_sd)


def test_O17_M10_a_closed_gate_is_sent_with_what_where_and_fix(
    recipe: Recipe, instance: DagsterInstance, server: Received, tmp_path: Path
) -> None:
    (tmp_path / "data" / "rose.txt").unlink()
    location = Location(recipe, instance)
    result = location.run()
    assert not result.success
    instance.add_run_tags(result.run_id, {ATTEMPT_TAG: "1 of 4"})
    assert location.evaluate("failure_alerts", result) == [], "a result, which stores the cursor"
    (alert,) = server.bodies
    assert (alert["title"], alert["level"], alert["run_id"]) == (f"{JOB} failed", "error", result.run_id)
    (problem,) = alert["problems"]
    assert problem["what"].startswith("GateClosedError: ")
    assert "captions_present" in f"{problem}"
    assert problem["where"] != ""
    assert problem["fix"] != ""


def test_a_tick_sends_one_alert_and_stores_its_cursor(
    recipe: Recipe, instance: DagsterInstance, server: Received
) -> None:
    """Otherwise a tick of several slow alerts ends without a cursor, and the next one sends them again."""
    location = Location(recipe, instance)
    repository = location.definitions.get_repository_def()
    failing = repository.get_sensor_def("failure_alerts")
    nightly = repository.get_job(JOB)
    cursor: str | None = None
    sent: list[int] = []
    for number in range(4):
        context = build_sensor_context(instance, cursor=cursor)
        cursor = failing.evaluate_tick(context).cursor
        sent.append(len(server.bodies))
        if number == 0:
            for _ in range(2):
                run = instance.create_run_for_job(nightly, tags={RECIPE_TAG: "flowers"})
                instance.report_run_failed(run, "its process 7 ended without reporting it")
    assert sent == [0, 1, 2, 2]
    # As dead_runs ends a run.
    assert server.bodies[0]["problems"] == [
        {
            "what": "its process 7 ended without reporting it",
            "where": "between two steps",
            "fix": "start the same job again; finished work is kept",
        }
    ]


def test_a_tick_with_runs_that_are_not_sent_and_one_that_is_sends_it_once(
    recipe: Recipe, instance: DagsterInstance, server: Received, tmp_path: Path
) -> None:
    """Dagster refuses a tick with a reaction to a run and a skip reason, and evaluates its runs again."""
    location = Location(recipe, instance)
    repository = location.definitions.get_repository_def()
    cursors = dict.fromkeys(("failure_alerts", "warning_alerts"), "")

    def tick(name: str) -> list[str]:
        """Return the runs about which a tick of a sensor sends an alert."""
        sent = len(server.bodies)
        context = build_sensor_context(instance, cursor=cursors[name] or None, repository_def=repository)
        cursors[name] = repository.get_sensor_def(name).evaluate_tick(context).cursor or ""
        return [body["run_id"] for body in server.bodies[sent:]]

    location.run()
    for name in cursors:
        assert tick(name) == []
    nightly = repository.get_job(JOB)
    again, failed = (instance.create_run_for_job(nightly, tags={RECIPE_TAG: "flowers"}) for _ in range(2))
    retry(instance, again.run_id, nightly)
    for run in (again, failed):
        instance.report_run_failed(run, "it ended")
    # A tick that may have waited for a retry waits for no other one, because Dagster limits its time.
    assert [tick("failure_alerts") for _ in range(3)] == [[], [failed.run_id], []]

    location.run()
    (tmp_path / "data" / "orphan.txt").write_text("a caption without an image", encoding="utf-8")
    warned = location.run()
    assert [tick("warning_alerts") for _ in range(2)] == [[warned.run_id], []]


@pytest.mark.parametrize(
    ("attempt", "title"),
    [
        ("3 of 4", f"{JOB} failed, attempt 3 of 4"),
        ("4 of 4", f"{JOB} failed, attempt 4 of 4: no further one follows"),
    ],
)
def test_M10_an_alert_of_a_run_of_the_sensor_says_whether_another_attempt_follows(
    recipe: Recipe, instance: DagsterInstance, attempt: str, title: str
) -> None:
    run = Location(recipe, instance).definitions.resolve_job_def(JOB)
    run = instance.create_run_for_job(
        run, status=DagsterRunStatus.FAILURE, tags={RECIPE_TAG: "flowers", ATTEMPT_TAG: attempt}
    )
    assert failure_alert(instance, run, [recipe]).title == title


@pytest.mark.parametrize(
    ("by_dagster", "attempt"),
    [((True,), ", attempt 3 of 4"), ((False,), ""), ((True, False), ""), ((False, True), "")],
    ids=["by Dagster", "by a person", "then by a person", "by a person first"],
)
def test_an_alert_of_a_run_that_a_person_executed_again_has_no_attempt(
    recipe: Recipe, instance: DagsterInstance, by_dagster: tuple[bool, ...], attempt: str
) -> None:
    job = Location(recipe, instance).definitions.resolve_job_def(JOB)
    run = instance.create_run_for_job(job, tags={RECIPE_TAG: "flowers", ATTEMPT_TAG: "3 of 4"})
    for is_automatic in by_dagster:
        parent, tags = run.run_id, run.tags
        # The UI copies all tags to a run of selected steps.
        run = instance.create_run_for_job(
            job,
            status=DagsterRunStatus.FAILURE,
            tags={**tags, "dagster/retry_number": "1"} if is_automatic else tags,
            root_run_id=run.root_run_id or run.run_id,
            parent_run_id=parent,
        )
        if is_automatic:
            instance.add_run_tags(parent, {"dagster/auto_retry_run_id": run.run_id})
    assert failure_alert(instance, run, [recipe]).title == f"{JOB} failed{attempt}"


def test_M10_a_recipe_that_became_broken_is_sent_once_until_it_changes(
    recipe: Recipe, instance: DagsterInstance, server: Received, tmp_path: Path
) -> None:
    cursor: str | None = None

    def tick(*mistakes: str) -> list[str]:
        """Reload the location with these mistakes, and return the titles of the alerts that follow."""
        nonlocal cursor
        sent = len(server.bodies)
        broken = [
            BrokenRecipe(what, tmp_path / f"{what}.yaml", RecipeError(what, where=f"{what}.yaml:1", fix="f"))
            for what in mistakes
        ]
        repository = build_definitions([recipe], broken).get_repository_def()
        context = build_sensor_context(instance, cursor=cursor, repository_def=repository)
        cursor = repository.get_sensor_def("recipe_alerts").evaluate_tick(context).cursor
        return [body["title"] for body in server.bodies[sent:]]

    assert tick() == []
    assert tick("one", "two") == ["excluded until repaired: one, two"]
    assert [problem["where"] for problem in server.bodies[-1]["problems"]] == ["one.yaml:1", "two.yaml:1"]
    assert tick("one", "two") == []
    assert tick("two", "three") == ["excluded until repaired: three"]
    assert tick() == []
    assert tick("one") == ["excluded until repaired: one"]
    assert tick("one", *"abcde") == ["excluded until repaired: a, b, c and 2 more"]
    for edited in ("no JSON", "3"):
        cursor = edited
        assert tick("one") == ["excluded until repaired: one"]


def retry(
    instance: DagsterInstance,
    run_id: str,
    job: JobDefinition,
    status: DagsterRunStatus = DagsterRunStatus.STARTING,
) -> None:
    """Create the retry of a run as Dagster's daemon does."""
    child = instance.create_run_for_job(job, status=status, parent_run_id=run_id, root_run_id=run_id)
    instance.add_run_tags(run_id, {"dagster/will_retry": "true", "dagster/auto_retry_run_id": child.run_id})


def test_a_run_that_dagster_starts_again_is_not_sent(
    recipe: Recipe, instance: DagsterInstance, server: Received, tmp_path: Path
) -> None:
    (tmp_path / "data" / "rose.txt").unlink()
    location = Location(recipe, instance)
    result = location.run()
    retry(instance, result.run_id, location.definitions.resolve_job_def(JOB))
    assert location.evaluate("failure_alerts", result) == []
    assert server.bodies == []


@pytest.mark.parametrize(
    ("after_s", "is_sent"), [(3.0, False), (None, True)], ids=["comes later", "never comes"]
)
def test_an_alert_waits_for_a_retry_that_is_due(
    recipe: Recipe, instance: DagsterInstance, after_s: float | None, is_sent: bool
) -> None:
    job = Location(recipe, instance).definitions.resolve_job_def(JOB)
    failed = instance.create_run_for_job(
        job, status=DagsterRunStatus.FAILURE, tags={"dagster/will_retry": "true"}
    )
    waited_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal waited_s
        waited_s += seconds
        if waited_s == after_s:
            retry(instance, failed.run_id, job)

    assert is_retried(instance, failed.run_id, wait_s=9.0, sleep=sleep) is not is_sent
    assert waited_s == (after_s or 9.0)


@pytest.mark.parametrize("fails", ["before it creates a run", "to submit the run"])
def test_a_run_whose_retry_has_failed_is_sent_without_a_wait(
    recipe: Recipe, instance: DagsterInstance, server: Received, tmp_path: Path, fails: str
) -> None:
    (tmp_path / "data" / "rose.txt").unlink()
    location = Location(recipe, instance)
    result = location.run()
    if fails == "to submit the run":
        job = location.definitions.resolve_job_def(JOB)
        retry(instance, result.run_id, job, DagsterRunStatus.NOT_STARTED)
    # Dagster's daemon changes the tag after an error.
    instance.add_run_tags(result.run_id, {"dagster/will_retry": "false"})
    started_s = time.monotonic()
    assert location.evaluate("failure_alerts", result) == []
    assert time.monotonic() - started_s < RETRY_WAIT_S / 2
    assert [body["run_id"] for body in server.bodies] == [result.run_id]


def test_a_warning_is_sent_once_until_it_returns(
    recipe: Recipe, instance: DagsterInstance, server: Received, tmp_path: Path
) -> None:
    location = Location(recipe, instance)
    first = location.run()
    assert first.success
    location.evaluate("warning_alerts", first)
    sent = len(server.bodies)
    location.evaluate("warning_alerts", location.run())
    assert len(server.bodies) == sent, "the same warnings are known"

    (tmp_path / "data" / "orphan.txt").write_text("a caption without an image", encoding="utf-8")
    location.evaluate("warning_alerts", location.run())
    alert = server.bodies[-1]
    assert len(server.bodies) == sent + 1
    assert (alert["title"], alert["level"]) == (f"{JOB} has 1 new warning", "warning")
    (problem,) = alert["problems"]
    assert problem["where"] == "flowers/raw_images, check oddities"
    assert "orphan.txt" in problem["what"] or "caption" in problem["what"]


def test_a_warning_is_sent_if_a_later_run_ended_before_the_sensor_read_it(
    recipe: Recipe, instance: DagsterInstance, server: Received, tmp_path: Path
) -> None:
    location = Location(recipe, instance)
    location.run()
    (tmp_path / "data" / "orphan.txt").write_text("a caption without an image", encoding="utf-8")
    new, later = location.run(), location.run()
    location.evaluate("warning_alerts", new)
    location.evaluate("warning_alerts", later)
    assert [alert["run_id"] for alert in server.bodies] == [new.run_id]


def test_a_failed_job_of_the_project_that_is_of_no_recipe_is_not_sent(
    recipe: Recipe, instance: DagsterInstance, server: Received
) -> None:
    @op
    def fail() -> None:
        raise ValueError("not a recipe")

    @job
    def other() -> None:
        fail()

    result = other.execute_in_process(instance=instance, raise_on_error=False)
    assert Location(recipe, instance).evaluate("failure_alerts", result) is None
    assert server.bodies == []
    (problem,) = summarize_run(instance, result.run_id, [recipe]).problems
    assert "not a recipe" in problem.what
    assert "a bug in Latentline" not in problem.fix


def test_without_an_address_there_are_no_sensors_for_alerts(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LATENTLINE_WEBHOOK", raising=False)
    names = {sensor.name for sensor in build_definitions([recipe]).get_repository_def().sensor_defs}
    assert not {"failure_alerts", "warning_alerts", "recipe_alerts"} & names


def test_alerts_of_checks_without_their_assets_name_the_assets_and_compare_each_check(
    recipe: Recipe, instance: DagsterInstance, tmp_path: Path
) -> None:
    (tmp_path / "data" / "orphan.txt").write_text("a caption without an image", encoding="utf-8")
    location = Location(recipe, instance)
    assert location.run().success
    by_hand = location.definitions.get_repository_def().get_job("__ASSET_JOB")

    def check(name: str) -> DagsterRun:
        # As the UI executes a check.
        checks = frozenset({AssetCheckKey(AssetKey(["flowers", "raw_images"]), name)})
        job = by_hand.get_subset(asset_selection=frozenset(), asset_check_selection=checks)
        run = DagsterRun(job.name, asset_selection=frozenset(), asset_check_selection=checks)
        instance.add_run(run)
        assert execute_run(InMemoryJob(job), run, instance).success
        return run

    run = check("oddities")
    alert = warning_alert(instance, run)
    assert alert is not None
    assert alert.title == "flowers/raw_images has 1 new warning"
    assert failure_alert(instance, run, [recipe]).title == "flowers/raw_images failed"
    check("names_distinct")
    assert warning_alert(instance, check("oddities")) is None
