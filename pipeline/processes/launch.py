"""Starting GPU work: the command line and environment of launched processes, and their errors."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

import pipeline.errors
from pipeline.errors import LatentlineError, LaunchError, StoppedError
from pipeline.processes.cluster_variables import without_cluster_variables
from pipeline.processes.machines import ONE_MACHINE, Machines
from pipeline.recipe.project import project_variables

if TYPE_CHECKING:
    from pipeline.recipe import AccelerateSettings

CPU_THREADS_PER_PROCESS = 2
"""Default of `accelerate.cpu_threads`. It does not depend on the machine's number of cores, because the
number of threads decides the last bits of a convolution on the CPU."""

OUTPUT_TAIL_LINES = 20
"""Maximum number of output lines that the error of a failed launch quotes."""

ERROR_FILE_VARIABLE = "LATENTLINE_ERROR_FILE"
"""Environment variable with the path of the file to which a launched process writes its `LatentlineError`."""

TRAINING_MODULE = "pipeline.trained_lora.worker"
"""Entry module of training. Only its processes may be on several machines."""

THREADS_VARIABLE = "LATENTLINE_CPU_THREADS"
"""Environment variable with `accelerate.cpu_threads`."""

WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Environment variables that decide how long OpenMP threads spin while they wait."""

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with the settings of torch's CUDA allocator; the second name is older."""

PARENT_VARIABLE = "LATENTLINE_PARENT_PID"
"""Environment variable with the id of the process that a launched process must not outlive."""

_INTERRUPTED_STATUSES = (-signal.SIGINT, 128 + signal.SIGINT)
"""Statuses of a process that Ctrl-C ended."""

_PRINTED_ERROR = re.compile(
    r"^(\w+Error): (.+(?:\n(?!  where: |\w+Error: ).*)*?)\n"
    r"  where: (.*(?:\n {9}.*)*)\n"
    r"  fix:   (.*(?:\n {9}.*)*)\n",
    re.MULTILINE,
)
"""The class and the three parts of an error, as `LatentlineError.text` writes them after the class."""

_POLL_S = 0.1

_GRACE_S = 20.0
"""Seconds between the stop of a process and its kill; a training writes its checkpoint in this time."""

_STOPPED_STATUSES = (-signal.SIGTERM, 128 + signal.SIGTERM)

Meanwhile: TypeAlias = Callable[[], object]


class Launch(Protocol):
    """A function that runs one entry module in launched processes until they end."""

    def __call__(self, module: str, job_file: Path, meanwhile: Meanwhile | None = None) -> None:
        """Run `python -m <module> <job file>` in `accelerate.num_processes` processes.

        The module writes its results to the folder of the job file. `meanwhile` is called in this process
        while the launched ones import torch.

        Raises:
            Exception: `meanwhile` raised it. The processes have ended by then.
            LatentlineError: The module raised it.
            LaunchError: A process failed for another reason. The error quotes the end of its output.
        """
        ...


def launch_command(
    settings: AccelerateSettings, module: str, job_file: Path, machines: Machines = ONE_MACHINE
) -> list[str]:
    """Return the arguments of Python for a single process, or of `accelerate launch` on this machine.

    Raises:
        LaunchError: The processes cannot be divided among the machines.
    """
    machines.num_processes_here(settings)
    if settings.num_processes == 1:
        # For a single process, accelerate's launcher only sets `accelerate_variables`, but it imports torch
        # first, which takes seconds, and stays in memory until the process ends.
        return [sys.executable, "-m", module, str(job_file)]

    # The project's own file and explicit options, so that the user's accelerate configuration has no effect.
    # The launched process looks for a GPU, because only it imports torch.
    command = [sys.executable, "-m", "pipeline.processes.worker.accelerate_launch"]
    command += ["--config_file", str(Path(__file__).parent / "accelerate.yaml")]
    command += ["--num_processes", str(settings.num_processes), "--num_machines", str(machines.number)]
    if machines.number == 1:
        command += ["--main_process_port", "0"]  # any free port, for concurrent launches
    else:
        command += ["--machine_rank", str(machines.rank), "--main_process_ip", machines.host]
        command += ["--main_process_port", str(machines.port), "--rdzv_conf", f"timeout={machines.wait_s}"]
    command += ["--mixed_precision", _launched_precision(settings), "--dynamo_backend", "no"]
    command += ["--num_cpu_threads_per_process", str(settings.cpu_threads), "--multi_gpu"]
    return [*command, "-m", module, str(job_file)]


def _launched_precision(settings: AccelerateSettings) -> str:
    # With "auto", the process resolves the precision for its model and passes it to its `Accelerator`.
    return "no" if settings.mixed_precision == "auto" else settings.mixed_precision


def launch_environment(
    settings: AccelerateSettings, error_file: Path, machines: Machines = ONE_MACHINE
) -> dict[str, str]:
    """Return this process's environment with the variables of a launched process.

    `error_file` is the path to which the launched process writes its error.
    """
    return {
        # Without a scheduler's RANK and similar ones, because accelerate's launcher sets its own.
        **without_cluster_variables(os.environ),
        "PYTHONPATH": python_path(),
        ERROR_FILE_VARIABLE: str(error_file),
        PARENT_VARIABLE: str(os.getpid()),
        **worker_variables(settings),
        **(accelerate_variables(settings) if settings.num_processes == 1 else {}),
        **machines.environment(),
    }


def accelerate_variables(settings: AccelerateSettings) -> dict[str, str]:
    """Return the variables that `accelerate launch` sets for a single process.

    `Accelerator` reads them. The values of the user's environment have no effect, as with the launcher.
    """
    return {
        "ACCELERATE_USE_CPU": "False",
        "ACCELERATE_MIXED_PRECISION": _launched_precision(settings),
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
    }


def python_path() -> str:
    """Return a `PYTHONPATH` with which a process can import the project from any working directory."""
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))


def worker_variables(settings: AccelerateSettings) -> dict[str, str]:
    """Return the variables of a launched process that have the same values on all machines."""
    return {
        "PYTHONUNBUFFERED": "1",
        "PYTHONUTF8": "1",
        "OMP_NUM_THREADS": str(settings.cpu_threads),  # accelerate's launcher sets the same
        THREADS_VARIABLE: str(settings.cpu_threads),
        "TOKENIZERS_PARALLELISM": "false",  # prevents a warning about forks
        **project_variables(),
        **_wait_policy(settings),
        **_allocator_settings(),
    }


def _wait_policy(settings: AccelerateSettings) -> dict[str, str]:
    own = {name: os.environ[name] for name in WAIT_VARIABLES if name in os.environ}
    # OpenMP threads that sleep at once wake up late: a step took 0.29 s with 5,000 spins, and 0.44 s with
    # none. Without a core for each thread, they take the cores from those that work: with four processes on
    # two cores, a step took 6 s with libgomp's default of 300,000 spins, 0.13 s with 5,000, and 0.05 s with
    # none. See docs/operations.md.
    has_own_cores = settings.num_processes * settings.cpu_threads <= num_cores()
    return own or ({"GOMP_SPINCOUNT": "5000"} if has_own_cores else {"OMP_WAIT_POLICY": "PASSIVE"})


def _allocator_settings() -> dict[str, str]:
    # Buckets of many sizes fragment fixed segments, until memory runs out with gigabytes unused.
    is_set = any(name in os.environ for name in ALLOCATOR_VARIABLES)
    supported = sys.platform == "linux"
    return {} if is_set or not supported else {ALLOCATOR_VARIABLES[0]: "expandable_segments:True"}


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def cpu_threads() -> int:
    """Return the number of threads that a launched process uses for computations on the CPU."""
    return int(os.environ.get(THREADS_VARIABLE, CPU_THREADS_PER_PROCESS))


@dataclass
class OutputFile:
    """The output of launched processes, in a file: a pipe would break when the reading process is killed."""

    file: Path
    _num_read_bytes: int = 0

    def new_text(self, *, final: bool = False) -> str:
        """Return the output since the last call: complete lines only, unless `final`."""
        if not self.file.exists():
            return ""
        with self.file.open("rb") as file:
            file.seek(self._num_read_bytes)
            new = file.read()

        # A process that was killed may not have ended its last line, which then is never complete.
        new = new if final else new[: new.rfind(b"\n") + 1]
        self._num_read_bytes += len(new)
        return new.decode("utf-8", errors="replace")

    def lines(self) -> list[str]:
        """Return all lines; none if the file does not exist."""
        if not self.file.exists():
            return []
        return self.file.read_text(encoding="utf-8", errors="replace").splitlines()


class LocalLaunch:
    """A `Launch` without Dagster: it waits for one subprocess, and quotes its output in errors."""

    def __init__(self, settings: AccelerateSettings, log: Callable[[str], None] | None = None) -> None:
        """Launch with the recipe's `accelerate` settings.

        `log` receives the lines that the process prints, without the lines of its error; None for none.
        """
        self._settings = settings
        self._log = log

    def __call__(self, module: str, job_file: Path, meanwhile: Meanwhile | None = None) -> None:
        """See `Launch.__call__`."""
        with tempfile.TemporaryDirectory(prefix="latentline-") as folder:
            error_file, output = Path(folder) / "error.json", OutputFile(Path(folder) / "output.txt")
            with output.file.open("wb") as file:
                process = subprocess.Popen(
                    launch_command(self._settings, module, job_file),
                    env=launch_environment(self._settings, error_file),
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )

            try:
                if meanwhile is not None:
                    meanwhile()
                status = _wait(process, output, error_file=error_file, log=self._log)
            # Ctrl-C raises KeyboardInterrupt, and must not leave the process running either.
            except BaseException:
                _end(process)
                raise

            if status == 0:
                return
            lines = output.lines()
            if status in _INTERRUPTED_STATUSES or lines[-1:] == ["KeyboardInterrupt"]:
                # A terminal sends Ctrl-C to both processes; this one may notice the child's end first. During
                # its start or end, Python's exit status is 1 and only the traceback names the cause.
                raise KeyboardInterrupt
            raise launch_error(module, status, output=lines, error_file=error_file)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    # Also after a second Ctrl-C, which ends the wait.
    finally:
        process.kill()
        process.wait()


def _wait(
    process: subprocess.Popen[bytes],
    output: OutputFile,
    *,
    error_file: Path,
    log: Callable[[str], None] | None,
) -> int:
    if log is None:
        return process.wait()

    while True:
        status = process.poll()
        text = output.new_text(final=status is not None)

        # The process writes its error to the file before it prints it. The launch raises it, so that lines
        # which are read after that are not needed.
        if error_file.exists():
            return process.wait()
        for line in text.splitlines():
            log(line)
        if status is not None:
            return status
        time.sleep(_POLL_S)


def launch_error(module: str, status: int, *, output: list[str], error_file: Path) -> LatentlineError:
    """Return the error of a launch that ended with `status`, or with minus the number of a signal.

    That is the error that the module wrote to `error_file`, if there is one. Otherwise, a `LaunchError`
    quotes the last `OUTPUT_TAIL_LINES` of `output`, without stack frames. It is a `StoppedError` after a
    SIGTERM.
    """
    if error_file.is_file():
        return error_from_json(error_file.read_text(encoding="utf-8"))

    # The log contains the complete traceback.
    lines = [line for line in output if line.strip() and not _is_stack_frame(line)][-OUTPUT_TAIL_LINES:]
    last_line = f": {lines[-1].strip()}" if lines else ""
    kind = StoppedError if status in _STOPPED_STATUSES else LaunchError
    return kind(
        f"{module} ended {describe_status(status)}{last_line}",
        where="\n".join([f"the processes of {module}, last output:", *(lines or ["(none)"])]),
        fix=_fix(status),
    )


def error_to_json(err: LatentlineError) -> str:
    """Return an error as text, with which a launched process hands it to the launching one."""
    return json.dumps({"kind": type(err).__name__, "what": err.what, "where": err.where, "fix": err.fix})


def error_from_json(text: str) -> LatentlineError:
    """Return the error of `error_to_json`, which another machine may have written.

    Raises:
        ValueError: The text does not describe an error.
    """
    try:
        parts = json.loads(text)
        kind = getattr(pipeline.errors, parts["kind"], LatentlineError)
        if not issubclass(kind, LatentlineError):
            raise TypeError(f"{parts['kind']} is no error")
        return kind(str(parts["what"]), where=str(parts["where"]), fix=str(parts["fix"]))
    except (TypeError, KeyError, RecursionError) as err:
        raise ValueError(f"not an error of a process: {err}") from err


def error_in_output(output: Sequence[str]) -> LatentlineError | None:
    """Return the first error that a command of `latentline` has printed, or None."""
    text = "\n".join(output) + "\n"
    for match in _PRINTED_ERROR.finditer(text):
        kind = getattr(pipeline.errors, match[1], None)
        if isinstance(kind, type) and issubclass(kind, LatentlineError):
            where, fix = (match[part].replace("\n         ", "\n") for part in (3, 4))
            return kind(match[2], where=where, fix=fix)
    return None


def _is_stack_frame(line: str) -> bool:
    return line.startswith(("Traceback (most recent call last)", "  File ", "    "))


def describe_status(status: int) -> str:
    """Describe an exit status: "with exit status 1" or "by signal SIGKILL"."""
    number = -status if status < 0 else status - 128
    try:
        return f"by signal {signal.Signals(number).name}"
    except ValueError:
        return f"with exit status {status}"


def _fix(status: int) -> str:
    # Linux's out-of-memory killer sends SIGKILL. `accelerate_launch` returns 128 plus the number of a
    # worker's signal.
    if status in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return (
            "the system killed it, most often because memory ran out: free memory, or lower batch_size or "
            "resolution if it was encoding or training"
        )
    if status in (*_STOPPED_STATUSES, *_INTERRUPTED_STATUSES):
        return "it was stopped: start the job again, and it resumes"
    return "correct the cause in the output and start the job again; finished work is kept"
