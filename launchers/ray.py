"""Encoding and training as jobs of a Ray cluster, which run launchers/ray_job.

Ray's own client submits them: `PipesRayJobClient` of dagster-ray stops a job only for Dagster's interruption,
does not wait for its end, and has no place for an observer.

`.ci/clusters` tests it with Ray 2.60.0 and a cluster of two nodes on one machine, see
tests/launchers/ray_cluster.py. Not tested: GPUs, several machines.
"""

from __future__ import annotations

import asyncio
import shlex
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dagster import AssetExecutionContext
from pydantic import Field

from launchers.ray_job.work import RESULT, RayWork, parse_result
from launchers.remote import RemoteLauncher
from pipeline.encoding.shared_encoding import SharedEncoding
from pipeline.errors import LaunchError
from pipeline.processes.launch import error_from_json, worker_variables
from pipeline.processes.machines import Machines
from pipeline.processes.thread_stop import pause
from resources.local_launcher import Observer
from resources.process_output import uninterrupted, write_output
from resources.step_log import StepLog, step_log

if TYPE_CHECKING:
    from pipeline.recipe import AccelerateSettings

if find_spec("ray") is None:  # reported when the definitions load, which do not import Ray, as that takes 1 s
    raise ModuleNotFoundError("No module named 'ray'", name="ray")

POLL_S = 1.0

LOG_END_S = 10.0
"""Longest wait for the end of the log after the job has ended."""

ACCEPTANCE_S = 10.0
"""Longest wait until the cluster knows a job after its submission was interrupted."""

_NOT_READY = "try again later"
"""Part of Ray's answer while no agent of the cluster has started yet."""

LOST_AFTER_S = 60.0
"""Time without an answer from the cluster after which a job counts as lost."""

STOP_MARGIN_S = 30
"""Time beyond `grace_s` in which a stopped job ends, before Ray kills it."""

STOP_WAIT_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
"""Environment variable of a job with the seconds between its stop and its kill; 3 by default."""


class RayLauncher(RemoteLauncher):
    """Submits encoding and training as jobs of Ray."""

    address: str = Field(default="http://127.0.0.1:8265", description="Address of the cluster's dashboard.")
    python: str = Field(default="python", description="Python with Latentline on the nodes.")
    num_cpus: float = Field(default=1.0, gt=0, description="CPUs that Ray reserves for each process.")
    num_gpus: float = Field(default=0.0, ge=0, description="GPUs that Ray reserves for each process.")
    runtime_env: dict[str, Any] = Field(default_factory=dict, description="Runtime environment of the jobs.")

    def encode(
        self,
        context: AssetExecutionContext,
        settings: AccelerateSettings,
        encoding: SharedEncoding,
        num_shards: int,
    ) -> Sequence[str]:
        """See `RemoteLauncher.encode`; Ray runs as many workers at a time as it has resources for."""
        work = self._work("encode", str(encoding.address), num_shards, num_processes=1)
        job = self._job(f"latentline-{encoding.encoding_id}", work, settings)
        return job.run(context)

    def train(
        self,
        context: AssetExecutionContext,
        settings: AccelerateSettings,
        job_file: Path,
        observer: Observer | None,
    ) -> None:
        """See `RemoteLauncher.train`; each machine is another node."""
        num_processes = Machines(self.machines).num_processes_here(settings)
        work = self._work("train", str(job_file), self.machines, num_processes=num_processes)
        # Each attempt at a run needs another name.
        job = self._job(f"latentline-{job_file.parent.name}-{uuid.uuid4().hex[:8]}", work, settings)
        observe = None if observer is None else observer(job_file)
        job.run(context, observe=observe)

    def _work(
        self, kind: Literal["encode", "train"], argument: str, number: int, *, num_processes: int
    ) -> RayWork:
        resources = {"CPU": self.num_cpus * num_processes}
        if self.num_gpus:
            resources["GPU"] = self.num_gpus * num_processes
        return RayWork(kind, argument, number, resources, self.wait_s, self.grace_s)

    def _job(self, name: str, work: RayWork, settings: AccelerateSettings) -> _Job:
        command = shlex.join([self.python, "-m", "launchers.ray_job", work.to_json()])
        environment = job_environment(self.runtime_env, settings, grace_s=self.grace_s)
        return _Job(self.address, name, command, environment, stop_s=self.grace_s + STOP_MARGIN_S)


def job_environment(
    runtime_env: Mapping[str, Any], settings: AccelerateSettings, *, grace_s: float
) -> dict[str, Any]:
    """Return the user's `runtime_env`, which takes precedence, with the variables of launched processes."""
    root = Path(__file__).resolve().parents[1]

    # Variables of the step are not passed on: Ray's dashboard shows the environment of each job.
    variables = {
        **worker_variables(settings),
        # Ray inserts the node's own value. A path that does not exist there has no effect.
        "PYTHONPATH": f"{root}:${{PYTHONPATH}}",
        STOP_WAIT_VARIABLE: str(int(grace_s) + STOP_MARGIN_S),
    }
    return {**runtime_env, "env_vars": {**variables, **runtime_env.get("env_vars", {})}}


@dataclass
class _Job:
    address: str
    # A unique submission id, which also shows whether the cluster has received an unanswered submission.
    name: str
    command: str
    runtime_env: Mapping[str, Any]
    stop_s: float
    _client: Any = None
    _may_exist: bool = False
    _num_forwarded: int = 0
    _over: threading.Event = field(default_factory=threading.Event)

    def run(
        self, context: AssetExecutionContext, *, observe: Callable[[bool], object] | None = None
    ) -> Sequence[str]:
        """Submit the job, wait for its end, and return the last lines of failed commands."""
        log = step_log(context)
        follower = threading.Thread(target=self._follow_log, name="ray-job-log", daemon=True)
        try:
            self._submit()
            log.info(f"submitted the Ray job {self.name} to {self.address}")
            follower.start()
            self._wait(observe)
        # Also Dagster's stop, SIGINT and SIGTERM: no job may outlive its step.
        except BaseException as err:
            if self._may_exist:
                self._stop_or_warn(log, because=type(err).__name__)
            raise
        finally:
            self._over.set()
            if follower.is_alive():
                follower.join(LOG_END_S)

        # The follower may have lost its connection before the end of the log.
        output = self._repeated(lambda: self._client.get_job_logs(self.name))
        self._forward(output[self._num_forwarded :])
        if observe is not None:
            observe(True)
        results = [line for line in output.splitlines() if line.startswith(RESULT)]
        if not results:
            raise self._failure()
        result = parse_result(results[-1])
        if result.error is not None:
            raise error_from_json(result.error)
        return result.last_output

    def _submit(self) -> None:
        submission: Any = import_module("ray.job_submission")
        exceptions: Any = import_module("ray.exceptions")
        try:
            self._client = submission.JobSubmissionClient(self.address)
        except OSError as err:
            raise self._unreachable(err) from err
        self._may_exist = True
        try:
            self._send()
        except OSError as err:
            # The cluster may have accepted the job before the connection was lost.
            if not self._repeated(self._is_known):
                self._may_exist = False
                raise self._unreachable(err) from err
        except (RuntimeError, ValueError, TypeError, exceptions.RayError) as err:
            self._may_exist = False
            raise LaunchError(
                f"Ray rejected the job {self.name}: {_short(err)}",
                where=f"launcher.address: {self.address}",
                fix="correct the cause that Ray names, often a key of launcher.runtime_env in the deployment "
                "file, a missing RAY_AUTH_TOKEN, or a cluster with another version of Ray",
            ) from err

    def _send(self) -> None:
        """Submit the job, again and again while a cluster that has just started accepts none."""
        end_s = time.monotonic() + LOST_AFTER_S
        while True:
            try:
                self._client.submit_job(
                    entrypoint=self.command, submission_id=self.name, runtime_env=dict(self.runtime_env)
                )
            except RuntimeError as err:
                if _NOT_READY not in str(err) or time.monotonic() > end_s:
                    raise
                time.sleep(POLL_S)
            else:
                return

    def _repeated(self, request: Callable[[], Any]) -> Any:
        """Return the answer to a request, which is repeated: the cluster's head may be busy or restart."""
        end_s = time.monotonic() + LOST_AFTER_S
        while True:
            try:
                return request()
            except (RuntimeError, OSError) as err:
                if time.monotonic() > end_s:
                    raise self._unreachable(err) from err
            time.sleep(POLL_S)

    def _wait(self, observe: Callable[[bool], object] | None) -> None:
        while not self._repeated(lambda: self._client.get_job_status(self.name)).is_terminal():
            if observe is not None:
                observe(False)
            pause(POLL_S)

    def _is_known(self) -> bool:
        return any(job.submission_id == self.name for job in self._client.list_jobs())

    def _stop_or_warn(self, log: StepLog, *, because: str) -> None:
        with uninterrupted():
            problem = self._stop()

            # After the stop, because a line of the log waits for Dagster's database. In the block,
            # because a second Ctrl-C must not lose it.
            if problem is None:
                log.info(f"stopped the Ray job {self.name} ({because})")
            else:
                log.warning(
                    f"the Ray job {self.name} could not be stopped ({problem}); stop it: "
                    f"ray job stop --address {self.address} {self.name}"
                )

    def _stop(self) -> str | None:
        """Stop the job, wait until its commands have ended, and return why it may still run, or None."""
        end_s = time.monotonic() + self.stop_s
        acceptance_end_s = time.monotonic() + ACCEPTANCE_S
        try:
            # The cluster may accept the job after a signal has interrupted its submission.
            while not self._is_known():
                if time.monotonic() > acceptance_end_s:
                    return f"the cluster has not accepted it within {ACCEPTANCE_S:g} s"
                time.sleep(POLL_S / 4)
            self._client.stop_job(self.name)
            while not self._client.get_job_status(self.name).is_terminal():
                if time.monotonic() > end_s:
                    return f"it is still running after {self.stop_s:g} s"
                time.sleep(POLL_S / 4)
        except (RuntimeError, OSError) as err:
            return _short(err)
        return None

    def _follow_log(self) -> None:
        client_error: Any = import_module("aiohttp").ClientError

        async def follow() -> None:
            # Each connection receives the log from its start.
            skipped = self._num_forwarded
            async for text in self._client.tail_job_logs(self.name):
                new = text[skipped:]
                skipped = max(0, skipped - len(text))
                self._forward(new)

        while not self._over.is_set():
            try:
                asyncio.run(follow())
                return
            except (RuntimeError, OSError, client_error):
                self._over.wait(POLL_S)

    def _forward(self, text: str) -> None:
        """Copy output to standard error, which Dagster captures, without the line of the result."""
        self._num_forwarded += len(text)
        write_output("".join(line for line in text.splitlines(True) if not line.startswith(RESULT)))

    def _failure(self) -> LaunchError:
        details = self._repeated(lambda: self._client.get_job_info(self.name))
        return LaunchError(
            f"the Ray job {self.name} ended with the status {details.status}: {_short(details.message)}",
            where=f"launcher.address: {self.address}",
            fix="if somebody stopped it, start the job again; otherwise correct the cause, often "
            "launcher.python or launcher.runtime_env in the deployment file: the nodes need the same "
            "version of Latentline",
        )

    def _unreachable(self, err: Exception) -> LaunchError:
        return LaunchError(
            f"the Ray cluster cannot be reached: {_short(err)}",
            where=f"launcher.address: {self.address}",
            fix="set launcher.address in the deployment file to the dashboard of a running cluster, such as "
            "http://head:8265",
        )


def _short(message: object) -> str:
    """Return a message in one line; of a long one the end, in which a log has the cause."""
    return " ".join(str(message).split())[-600:]
