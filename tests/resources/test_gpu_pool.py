"""A place in a pool for a launch: real claims in Dagster's database, also waiting and interrupted ones."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from dagster import AssetExecutionContext, DagsterInstance, ExecuteInProcessResult, asset, materialize

from pipeline.errors import LaunchError
from pipeline.processes.launch import Meanwhile
from resources.gpu_pool import WAITING, PoolLaunch
from tests.waiting import until

ONE_PLACE = "concurrency: {pools: {default_limit: 1, granularity: op}}\n"
ANOTHER = ("another run", "its_step")


@pytest.fixture
def instance(home: Path) -> Iterator[DagsterInstance]:
    """An instance with one place in each pool."""
    yield from opened(home, ONE_PLACE)


def opened(home: Path, settings: str) -> Iterator[DagsterInstance]:
    (home / "dagster.yaml").write_text(f"telemetry: {{enabled: false}}\n{settings}", encoding="utf-8")
    with DagsterInstance.from_config(str(home)) as opened_instance:
        yield opened_instance


def claimed(instance: DagsterInstance) -> list[str]:
    """Return the runs that hold a place in the pool."""
    return [slot.run_id for slot in instance.event_log_storage.get_concurrency_info("gpu").claimed_slots]


def queued(instance: DagsterInstance) -> list[str]:
    """Return the runs that wait for a place in the pool, and those that hold one."""
    return [step.run_id for step in instance.event_log_storage.get_concurrency_info("gpu").pending_steps]


class Launches:
    """A step with launches in the pool, and what they met."""

    def __init__(self, instance: DagsterInstance, *, error: BaseException | None = None) -> None:
        self._instance = instance
        self._error = error
        self.holders: list[list[str]] = []
        self.priorities: list[int | None] = []
        self.arguments: list[tuple[object, ...]] = []

    def __call__(self, module: str, job_file: Path, meanwhile: Meanwhile | None = None) -> None:
        self.holders.append(claimed(self._instance))
        storage = self._instance.event_log_storage
        self.priorities += [step.priority for step in storage.get_concurrency_info("gpu").pending_steps]
        self.arguments.append((module, job_file, meanwhile))
        if self._error is not None:
            raise self._error

    def run(self, number: int = 1, tags: dict[str, str] | None = None) -> ExecuteInProcessResult:
        """Execute the step in a run with these tags."""

        @asset
        def work(context: AssetExecutionContext) -> None:
            launch = PoolLaunch(context, "gpu", self)
            for _ in range(number):
                launch("a.module", Path("job.json"), len)

        return materialize([work], instance=self._instance, tags=tags, raise_on_error=False)


def test_a_place_is_held_during_each_launch_and_is_free_after_it(instance: DagsterInstance) -> None:
    launches = Launches(instance)
    result = launches.run(number=2)
    assert result.success
    assert launches.holders == [[result.run_id], [result.run_id]]
    assert launches.arguments[0] == ("a.module", Path("job.json"), len)
    assert (claimed(instance), queued(instance)) == ([], [])


def test_launches_in_several_threads_share_the_place_of_their_step(instance: DagsterInstance) -> None:
    both, holders = threading.Barrier(2), list[list[str]]()

    def launch(module: str, job_file: Path, meanwhile: Meanwhile | None = None) -> None:
        both.wait(timeout=60)
        holders.append(claimed(instance))

    @asset
    def work(context: AssetExecutionContext) -> None:
        shared = PoolLaunch(context, "gpu", launch)
        with shared.place():
            threads = [threading.Thread(target=shared, args=("a.module", Path("job.json"))) for _ in "12"]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            holders.append(claimed(instance))
        holders.append(claimed(instance))

    result = materialize([work], instance=instance)
    assert holders == [[result.run_id]] * 3 + [[]]
    assert queued(instance) == []


def test_a_step_that_launches_nothing_does_not_wait(instance: DagsterInstance) -> None:
    storage = instance.event_log_storage
    storage.initialize_concurrency_limit_to_default("gpu")
    assert storage.claim_concurrency_slot("gpu", *ANOTHER).is_claimed
    assert Launches(instance).run(number=0).success
    assert claimed(instance) == queued(instance) == [ANOTHER[0]]


@pytest.mark.parametrize("error", [LaunchError("it died", where="here", fix="again"), KeyboardInterrupt()])
def test_a_launch_that_fails_frees_its_place(instance: DagsterInstance, error: BaseException) -> None:
    launches = Launches(instance, error=error)
    with suppress(KeyboardInterrupt):
        assert not launches.run().success
    assert len(launches.holders[0]) == 1
    assert (claimed(instance), queued(instance)) == ([], [])


def test_a_launch_waits_until_the_place_is_free_and_says_so_once(
    instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resources.gpu_pool.FIRST_PAUSE_S", 0.01)
    storage = instance.event_log_storage
    storage.initialize_concurrency_limit_to_default("gpu")
    storage.claim_concurrency_slot("gpu", *ANOTHER)

    def free() -> None:
        until(lambda: len(queued(instance)) == 2)
        storage.free_concurrency_slot_for_step(*ANOTHER)

    thread = threading.Thread(target=free)
    thread.start()
    launches = Launches(instance)
    result = launches.run()
    thread.join()
    assert result.success
    assert launches.holders == [[result.run_id]]
    messages = [entry.user_message for entry in instance.all_logs(result.run_id)]
    assert messages.count(WAITING) == 1


@pytest.mark.parametrize(
    ("settings", "places", "limit"),
    [("", None, None), (ONE_PLACE, 2, 2), ("", 2, 2), (ONE_PLACE.replace("1", "3"), None, 3)],
)
def test_limits_are_those_of_dagster(
    home: Path, settings: str, places: int | None, limit: int | None
) -> None:
    """A pool without a limit has the default one, or none; a limit that a person has set stays."""
    for instance in opened(home, settings):
        storage = instance.event_log_storage
        if places is not None:
            storage.set_concurrency_slots("gpu", places)
            assert storage.claim_concurrency_slot("gpu", *ANOTHER).is_claimed
        launches = Launches(instance)
        result = launches.run()
        assert result.success
        own = [] if limit is None else [result.run_id]
        assert launches.holders == [[ANOTHER[0], *own] if places else own]
        limits = {each.name: each.limit for each in storage.get_pool_limits()}
        assert limits.get("gpu") == limit


@pytest.mark.parametrize(("granularity", "warnings"), [("op", 0), ("run", 1)])
def test_a_pool_that_counts_runs_is_warned_about(home: Path, granularity: str, warnings: int) -> None:
    """Dagster counts runs with a step in the pool, and no places that a step claims itself."""
    for instance in opened(home, ONE_PLACE.replace("granularity: op", f"granularity: {granularity}")):
        result = Launches(instance).run()
        assert result.success
        messages = [entry.user_message for entry in instance.all_logs(result.run_id)]
        assert sum("granularity" in message for message in messages) == warnings


@pytest.mark.parametrize(("tag", "priority"), [("7", 7), ("-2", -2), ("high", 0)])
def test_a_place_is_claimed_with_the_priority_of_the_run(
    instance: DagsterInstance, tag: str, priority: int
) -> None:
    launches = Launches(instance)
    assert launches.run(tags={"dagster/priority": tag}).success
    assert launches.priorities == [priority]


STEP = """
import sys
from pathlib import Path
from dagster import AssetExecutionContext, DagsterInstance, asset, materialize
from resources.gpu_pool import PoolLaunch

@asset
def work(context: AssetExecutionContext) -> None:
    PoolLaunch(context, "gpu", lambda *_: Path(sys.argv[2]).touch())("a.module", Path("job.json"))

with DagsterInstance.from_config(sys.argv[1]) as instance:
    materialize([work], instance=instance)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_wait_and_leaves_the_queue(
    instance: DagsterInstance, home: Path, tmp_path: Path, number: signal.Signals
) -> None:
    storage = instance.event_log_storage
    storage.initialize_concurrency_limit_to_default("gpu")
    storage.claim_concurrency_slot("gpu", *ANOTHER)
    command = [sys.executable, "-c", STEP, str(home), str(tmp_path / "launched")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    until(lambda: len(queued(instance)) == 2)
    process.send_signal(number)
    assert process.wait(60) != 0
    assert queued(instance) == claimed(instance) == [ANOTHER[0]]
    assert not (tmp_path / "launched").exists()
