"""A signal ends the wait between two attempts of a step, in a real run."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from dagster import (
    DagsterEventType,
    DagsterExecutionInterruptedError,
    DagsterInstance,
    Definitions,
    JobDefinition,
    RetryRequested,
    asset,
    define_asset_job,
    execute_job,
    in_process_executor,
    reconstructable,
)

from resources.recipe_executor import recipe_executor

WAIT_S = 600


@asset
def rose() -> None:
    """Fail, and request another attempt in `WAIT_S`."""
    raise RetryRequested(max_retries=1, seconds_to_wait=WAIT_S)


def retrying_job() -> JobDefinition:
    executor = recipe_executor(in_process_executor, [])
    definitions = Definitions(assets=[rose], jobs=[define_asset_job("roses")], executor=executor)
    return definitions.resolve_job_def("roses")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_M5_a_signal_ends_the_wait_for_another_attempt(tmp_path: Path, number: signal.Signals) -> None:
    with DagsterInstance.local_temp(str(tmp_path)) as instance:
        sent_s: list[float] = []

        def stop() -> None:
            end_s = time.monotonic() + 200
            while time.monotonic() < end_s:
                runs = instance.get_runs()
                if runs and instance.all_logs(runs[0].run_id, of_type=DagsterEventType.STEP_UP_FOR_RETRY):
                    break
                time.sleep(0.1)
            time.sleep(1)  # until the executor waits
            sent_s.append(time.monotonic())
            os.kill(os.getpid(), number)

        stopper = threading.Thread(target=stop)
        stopper.start()
        with pytest.raises((DagsterExecutionInterruptedError, KeyboardInterrupt)):
            execute_job(reconstructable(retrying_job), instance, raise_on_error=True)
        assert time.monotonic() - sent_s[0] < 30, "the signal waited for the next attempt"
        stopper.join()
        (run,) = instance.get_runs()
        assert run.is_finished
