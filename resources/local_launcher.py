"""`accelerate launch` under Dagster: its output is forwarded, and no process outlives the step."""

from __future__ import annotations

import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, cast

from dagster import (
    AssetExecutionContext,
    ConfigurableResource,
    PipesMessageHandler,
    PipesTempFileContextInjector,
    PipesTempFileMessageReader,
    PreviewWarning,
    open_pipes_session,
)
from pydantic import Field

from pipeline.errors import LaunchError
from pipeline.processes.cluster_variables import parse_master
from pipeline.processes.fork_server import StartedProcess, start_process
from pipeline.processes.launch import (
    TRAINING_MODULE,
    Launch,
    Meanwhile,
    launch_command,
    launch_environment,
    launch_error,
)
from pipeline.processes.machines import ONE_MACHINE, Machines
from pipeline.processes.thread_stop import pause
from pipeline.recipe.deployment import WAIT_S
from resources.process_output import ForwardedOutput, uninterrupted
from resources.step_log import StepLog, step_log

if TYPE_CHECKING:
    from pipeline.processes.tree import ProcessTree
    from pipeline.recipe import AccelerateSettings

POLL_S = 0.05
SCAN_INTERVAL_S = 1.0
"""Seconds between two scans of the process tree."""

GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
"""CUDA's environment variable with the GPUs that a process may use."""

_FILTERS_LOCK = threading.Lock()


Observer: TypeAlias = Callable[[Path], Callable[[bool], object]]


class AccelerateLauncher(ConfigurableResource):
    """Starts entry modules with `accelerate launch` in a Dagster Pipes session."""

    grace_s: float = Field(
        default=20.0,
        ge=0.0,
        description="Seconds between the stop of a run and the kill of its remaining processes; a training "
        "writes its checkpoint in this time.",
    )
    machines: int = Field(
        default=1,
        ge=1,
        description="Number of machines of a training. This one is machine 0, and the log has the command "
        "for all other machines. Encoding uses this machine alone.",
    )
    master: str = Field(
        default="",
        description="host:port where the machines of a training meet: a name or address of this machine, and "
        "a free port on it. Required for several machines.",
    )
    wait_s: int = Field(
        default=WAIT_S, ge=1, description="Longest wait for the other machines to start, in seconds."
    )

    concurrent_trainings: int = Field(
        default=1,
        ge=1,
        description="Maximum number of variants of a sweep that are trained at the same time.",
    )

    seal_packs: bool = Field(
        default=False, description="Whether encodings copy their new cache entries into packs."
    )

    def bind(
        self, context: AssetExecutionContext, settings: AccelerateSettings, observer: Observer | None = None
    ) -> Launch:
        """Return a `Launch`: its processes write to the log of `context`, and never outlive the step.

        `observer` is called with the job file before each launch. It returns a function that is called with
        False several times per second while the processes run, and once with True at their end.
        """
        places = SimpleQueue[int]()
        for place in range(self.concurrent_trainings):
            places.put(place)

        def launch(module: str, job_file: Path, meanwhile: Meanwhile | None = None) -> None:
            used, machines = self._used(settings, module)
            log = step_log(context)
            if machines.number > 1:
                from pipeline.trained_lora.joining import job_for_others  # imports Polars

                others = machines.command_of_others(job_for_others(job_file))
                log.info(f"waiting for the other machines; {others}")

            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                output, error_file = ForwardedOutput(folder / "output.txt"), folder / "error.json"
                variables = launch_environment(used, error_file, machines)
                if module == TRAINING_MODULE and self.concurrent_trainings > 1:
                    variables |= stack.enter_context(_own_place(places, used.num_processes))
                variables |= stack.enter_context(_session(context, log))
                status = _run_watched(
                    partial(start_process, launch_command(used, module, job_file, machines), variables),
                    output=output,
                    grace_s=self.grace_s,
                    log=log,
                    meanwhile=meanwhile,
                    observe=_not_observed if observer is None else observer(job_file),
                )
                if status != 0:
                    raise launch_error(module, status, output=output.lines(), error_file=error_file)

        return launch

    def _used(self, settings: AccelerateSettings, module: str) -> tuple[AccelerateSettings, Machines]:
        """Return the settings and the machines of a module: all of them for a training, else this one."""
        machines = self._all_machines()
        return (settings, machines) if module == TRAINING_MODULE else (machines.on_one(settings), ONE_MACHINE)

    def _all_machines(self) -> Machines:
        if self.machines == 1:
            return ONE_MACHINE
        host, port = parse_master(self.master, where="launcher.master")
        return Machines(self.machines, 0, host, port, self.wait_s)


def _not_observed(final: bool) -> None:
    del final


@contextmanager
def _own_place(places: SimpleQueue[int], num_processes: int) -> Generator[Mapping[str, str]]:
    """Take a place among the trainings that run at the same time, and provide the variable of its GPUs."""
    place = places.get()
    try:
        yield own_gpus(place, num_processes, os.environ.get(GPUS_VARIABLE, _gpus_of_machine()))
    finally:
        places.put(place)


def own_gpus(place: int, number: int, visible: str | None) -> dict[str, str]:
    """Return the variable that shows a training its own GPUs; none if they are hidden from all processes.

    Args:
        place: Number of the training among those that run at the same time, from 0.
        number: Number of its processes on this machine.
        visible: GPUs that this process may use, as in `GPUS_VARIABLE`; None if nothing lists them.

    Raises:
        LaunchError: The variable lists too few GPUs.
    """
    if visible in ("", "-1"):
        return {}
    first, end = place * number, (place + 1) * number
    listed = [str(each) for each in range(end)] if visible is None else visible.split(",")
    if len(listed) < end:
        raise LaunchError(
            f"training {place + 1} at the same time has no GPU to itself: the visible GPUs are {visible}",
            where="launcher.concurrent_trainings",
            fix=f"lower it to {len(listed) // number} or less, or list more GPUs in {GPUS_VARIABLE}",
        )
    return {GPUS_VARIABLE: ",".join(listed[first:end])}


def _gpus_of_machine() -> str | None:
    # A process that is shown a GPU that does not exist would train on the CPU. NVIDIA's driver for Linux has
    # this folder; without it, the number is not known, because only launched processes import torch.
    folder = Path("/proc/driver/nvidia/gpus")
    return ",".join(str(each) for each in range(len(list(folder.iterdir())))) if folder.is_dir() else None


@contextmanager
def _session(context: AssetExecutionContext, log: StepLog) -> Generator[Mapping[str, str]]:
    """Provide the environment variables that connect a launched process to a Pipes session."""
    with ExitStack() as stack:
        # The filters belong to the process, and a sweep launches from several threads.
        with _FILTERS_LOCK, warnings.catch_warnings():
            # Dagster's own session reads attributes that Dagster marks as deprecated or in preview.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", PreviewWarning)
            session = stack.enter_context(
                open_pipes_session(
                    context=context,
                    context_injector=PipesTempFileContextInjector(),
                    message_reader=_MessageReader(log),
                )
            )
        yield session.get_bootstrap_env_vars()


class _MessageReader(PipesTempFileMessageReader):
    """Reads the messages of a session. Dagster's own reader ends with the first one that cannot be stored."""

    def __init__(self, log: StepLog) -> None:
        super().__init__()
        self._log = log

    @contextmanager
    def read_messages(self, handler: PipesMessageHandler) -> Generator[Any]:
        lasting = cast("PipesMessageHandler", _MessageHandler(handler, self._log))
        with super().read_messages(lasting) as parameters:
            yield parameters


class _MessageHandler:
    """Logs the lines of launched processes, and passes other messages to the handler of their session."""

    def __init__(self, handler: PipesMessageHandler, log: StepLog) -> None:
        self._handler = handler
        self._log = log
        self.report_pipes_framework_exception = handler.report_pipes_framework_exception

    def handle_message(self, message: Any) -> None:
        parameters = message["params"]
        if message["method"] == "log":
            self._log.log(parameters["level"], parameters["message"])
            return
        try:
            self._handler.handle_message(message)
        except Exception as err:  # the event log is away; the reader must not end
            self._log.info(f"the message {message['method']!r} was not stored: {type(err).__name__}")


def _run_watched(
    start: Callable[[BinaryIO], StartedProcess],
    *,
    output: ForwardedOutput,
    grace_s: float,
    log: StepLog,
    meanwhile: Meanwhile | None,
    observe: Callable[[bool], object],
) -> int:
    """Run a process in a new session and call `meanwhile`; return the exit status, or minus a signal."""
    from pipeline.processes.tree import ProcessTree

    with output.file.open("wb") as file:
        # A session of its own: Ctrl-C at a terminal reaches this process only, which then stops all others.
        process = start(file)
    tree = ProcessTree(process.pid)

    try:
        if meanwhile is not None:
            meanwhile()
        _wait(process, tree, output, observe)
    # Also Dagster's stop, SIGINT and SIGTERM: a process that outlived the step would hold the GPU.
    except BaseException as err:
        with uninterrupted():
            killed = tree.stop(grace_s=grace_s)
            process.wait()
            output.forward(final=True)
        log.info(f"stopped all processes ({type(err).__name__}); {len(killed)} were killed")
        raise

    # The process may have left descendants behind.
    with uninterrupted():
        tree.stop(grace_s=grace_s)
        output.forward(final=True)
    observe(True)
    return process.wait()


def _wait(
    process: StartedProcess,
    tree: ProcessTree,
    output: ForwardedOutput,
    observe: Callable[[bool], object],
) -> None:
    next_scan_s = 0.0
    while process.poll() is None:
        output.forward()
        observe(False)

        # A scan finds descendants before their parents die, and nothing else connects them with the tree.
        if time.monotonic() >= next_scan_s:
            tree.members()
            next_scan_s = time.monotonic() + SCAN_INTERVAL_S
        pause(POLL_S)
