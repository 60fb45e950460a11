"""The driver of the job: one Ray task for each command.

    task 0       latentline encode <encoding> --shard 0/2, or latentline train <job file> --rank 0 ...
    task 1       the same for shard 1/2 or rank 1; the machines of a training are on different nodes

The output of all commands goes through an actor to the log of the job, and its last line is the result.

`.ci/clusters` tests it with Ray 2.60.0 and a cluster of two nodes on one machine, see
tests/launchers/ray_cluster.py. Not tested: GPUs, several machines.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from launchers.ray_job.work import JobResult, RayWork
from pipeline.errors import LatentlineError, LaunchError, counted
from pipeline.processes.foreground import run_in_foreground, stop_signals
from pipeline.processes.launch import (
    ERROR_FILE_VARIABLE,
    OUTPUT_TAIL_LINES,
    PARENT_VARIABLE,
    describe_status,
    error_in_output,
    error_to_json,
    launch_error,
)

# The second attempt encodes only the rest of the shard.
ENCODE_ATTEMPTS = 2
"""Attempts at a shard if Ray loses the node or process that encodes it."""

END_TOGETHER_S = 60.0
"""Time in which the other machines of a failed training may end by themselves, before they are stopped."""

POLL_S = 0.3

RESUME = "start the job again, and it resumes"


@dataclass(frozen=True)
class Ended:
    """The end of a command.

    Attributes:
        status: Exit status, or minus the number of the signal that ended the command.
        error: Error in the form of `error_to_json`; None after success.
        last_output: Last lines; empty after success.
    """

    status: int
    error: str | None = None
    last_output: Sequence[str] = ()


@dataclass
class Output:
    """Output of all commands; an actor, from which the driver takes it."""

    lines: list[str] = field(default_factory=list[str])

    def put(self, line: str) -> None:
        """Add a line."""
        self.lines.append(line)

    def take(self) -> list[str]:
        """Remove and return all lines."""
        lines, self.lines = self.lines, []
        return lines


def main(work_json: str) -> int:
    """Run the commands of a `RayWork` as JSON, print the result, and return the exit status."""
    ray: Any = import_module("ray")
    work = RayWork.from_json(work_json)
    # The output of tasks reaches the log through `Output`, complete and in order.
    ray.init(log_to_driver=False)

    # After `init`, which sets handlers of its own. Ray stops a job with SIGTERM to this process.
    with stop_signals() as stopped:
        try:
            result = Driver(ray, work, stopped).run()
        except LatentlineError as err:
            result = JobResult(error_to_json(err))
    if stopped and result.error is None:
        error = LaunchError("the Ray job was stopped", where="the Ray cluster", fix=RESUME)
        result = JobResult(error_to_json(error), result.last_output)
    print(result.line(), flush=True)  # noqa: T201 - the log of the job
    return 0 if result.error is None else 1


@dataclass
class Driver:
    """Runs the commands of a job; the first signal in `stopped` stops them."""

    ray: Any
    work: RayWork
    stopped: Sequence[signal.Signals]

    def run(self) -> JobResult:
        """Run all commands, and return their result; a cluster that is too small is a LaunchError."""
        # Without CPUs, so that it starts on a busy cluster as well.
        output = self.ray.remote(num_cpus=0)(Output).remote()
        tasks = self._encoding(output) if self.work.kind == "encode" else self._training(output)
        ends = self._wait(tasks, output)

        failed = [(name, end) for name, end in ends.items() if end.status != 0]
        lines = [f"{name}: {line}" for name, end in failed for line in end.last_output]
        # The folder of an encoding has the errors of its shards. The first machine that failed is the cause.
        errors = [] if self.work.kind == "encode" else [end.error for _, end in failed]
        return JobResult(errors[0] if errors else None, lines[-OUTPUT_TAIL_LINES:])

    def _encoding(self, output: Any) -> dict[Any, str]:
        # A task runs as soon as a node is free. An empty task first shows that a node is large enough.
        options = _task_options(self.work) | {"scheduling_strategy": "SPREAD"}
        if not self._has_room(self.ray.remote(**options)(nothing).remote()):
            return {}
        options["max_retries"] = ENCODE_ATTEMPTS - 1
        return self._start([options] * self.work.number, output)

    def _training(self, output: Any) -> dict[Any, str]:
        # STRICT_SPREAD gives each machine a node of its own.
        group = self.ray.util.placement_group(
            [dict(self.work.resources)] * self.work.number, strategy="STRICT_SPREAD"
        )
        if not self._has_room(group.ready()):
            return {}
        strategies: Any = import_module("ray.util.scheduling_strategies")
        options = [
            _task_options(self.work)
            | {"scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(group, index)}
            | {"max_retries": 0}
            for index in range(self.work.number)
        ]

        # Machine 0 listens, so the meeting point is an address of its node.
        master = self.ray.get(self.ray.remote(**options[0])(free_address).remote())
        return self._start(options, output, master)

    def _start(self, options: Sequence[Mapping[str, Any]], output: Any, master: str = "") -> dict[Any, str]:
        tasks: dict[Any, str] = {}
        for index, each in enumerate(options):
            task = self.ray.remote(**each)(run_command).remote(self.work, index, master, output)
            tasks[task] = self.work.name(index)
        return tasks

    def _has_room(self, ready: Any) -> bool:
        """Wait for a reference that needs the resources; return False if the job is stopped before."""
        end_s = time.monotonic() + self.work.wait_s
        print(f"waiting for {self.work.shown_resources()}", flush=True)  # noqa: T201 - the log of the job
        while not self.ray.wait([ready], timeout=POLL_S)[0]:
            if self.stopped:
                return False

            # A cluster that is large enough but busy has no time limit.
            if time.monotonic() > end_s and not self.work.fits(self.ray.nodes()):
                raise no_room(self.work, self.ray.nodes())
        return True

    def _wait(self, tasks: Mapping[Any, str], output: Any) -> dict[str, Ended]:
        """Print the output until all tasks have ended, and return their ends by name, the earliest first."""
        ends: dict[str, Ended] = {}
        pending = list(tasks)
        failed_s: float | None = None
        is_cancelled = False
        while pending:
            done, pending = self.ray.wait(pending, timeout=POLL_S)
            ends |= {tasks[task]: self._end_of(task, tasks[task]) for task in done}
            for line in self.ray.get(output.take.remote()):
                print(line, flush=True)  # noqa: T201 - the log of the job

            # The shards of an encoding are independent, while a training ends with its first machine.
            if failed_s is None and self.work.kind == "train" and any(end.status for end in ends.values()):
                failed_s = time.monotonic()
            is_overdue = failed_s is not None and time.monotonic() > failed_s + END_TOGETHER_S
            # A second interrupt could reach a task while it returns.
            if not is_cancelled and (self.stopped or is_overdue):
                is_cancelled = True
                for task in pending:
                    self.ray.cancel(task)
        return ends

    def _end_of(self, task: Any, name: str) -> Ended:
        exceptions: Any = import_module("ray.exceptions")
        try:
            return self.ray.get(task)
        except exceptions.RayError as err:
            # The process of the task or its node died, or the task was cancelled before it started.
            error = LaunchError(
                f"Ray lost {name}: {' '.join(str(err).split())[:500]}",
                where="the Ray cluster",
                fix=f"{RESUME}; if this happens again, see Ray's logs of the node",
            )
            return Ended(1, error_to_json(error), [error.what])


def run_command(work: RayWork, index: int, master: str, output: Any) -> Ended:
    """Run a command in a task, until it ends or the task is cancelled."""
    ray: Any = import_module("ray")
    name = work.name(index)

    def show(line: str) -> None:
        # Waiting for the result of a call would lend the CPUs of this task to another one.
        output.put.remote(f"{name}: {line}")

    show(f"started on {socket.gethostname()}")

    # Ray cancels a task with SIGINT to its process, which stops the command.
    ended = run_with_error(work.command(index, master), work.grace_s, show)
    # This one is awaited: calls of one task are processed in order, so all lines have arrived then.
    ray.get(output.put.remote(f"{name}: ended {describe_status(ended.status)}"))
    return ended


def run_with_error(command: Sequence[str], grace_s: float, show: Callable[[str], None]) -> Ended:
    """Run a command until it ends or this process receives a stop signal, with an error if it fails."""
    with tempfile.TemporaryDirectory(prefix="latentline-") as folder:
        error_file, output_file = Path(folder) / "error.json", Path(folder) / "output.txt"

        # The command must not outlive this process, which Ray ends together with the driver.
        variables = {ERROR_FILE_VARIABLE: str(error_file), PARENT_VARIABLE: str(os.getpid())}
        status, _ = run_in_foreground(
            command, {**os.environ, **variables}, output_file=output_file, grace_s=grace_s, show=show
        )
        if status == 0:
            return Ended(status)
        lines = output_file.read_text(encoding="utf-8", errors="replace").splitlines()
        # `latentline train` prints the error of its processes.
        printed = error_in_output(lines)
        error = printed or launch_error("latentline", status, output=lines, error_file=error_file)
        return Ended(status, error_to_json(error), lines[-3:])


def nothing() -> None:
    """Do nothing; the end of this task shows that the cluster has room for another one."""


def free_address() -> str:
    """Return the address of this node, with a port that is free at the moment."""
    ray: Any = import_module("ray")
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"


def no_room(work: RayWork, nodes: Iterable[Mapping[str, Any]]) -> LaunchError:
    """Return the error for a cluster in which too few nodes have the resources of a command."""
    number = 1 if work.kind == "encode" else work.number
    found = [
        ", ".join(f"{name} {node['Resources'].get(name, 0):g}" for name in work.resources)
        for node in nodes
        if node["Alive"]
    ]
    return LaunchError(
        f"the Ray cluster must have {counted(number, 'node')} with {work.shown_resources()} each, but after "
        f"{work.wait_s} s its nodes have: {'; '.join(found) or 'nothing'}",
        where="launcher.num_cpus, launcher.num_gpus and launcher.machines",
        fix="add nodes to the cluster, or lower these settings in the deployment file; a machine of a "
        "training needs them once for each of its processes",
    )


def _task_options(work: RayWork) -> dict[str, Any]:
    return {"num_cpus": work.resources.get("CPU", 0), "num_gpus": work.resources.get("GPU", 0)}
