"""Processes that import their libraries before their job exists, and then wait for the job.

Dagster loads and the stages compare their files for as long as a training imports torch, diffusers and peft.
Both happen at the same time if the training process starts first, and so do the imports of an encoding:

    run      starts the process, works, and hands over variables, output file and job file, or ends it
    process  imports, reads a line of JSON from its standard input, and continues as if it had just started
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from pipeline.processes.guard import end_now, end_with_parent
from pipeline.processes.launch import ERROR_FILE_VARIABLE, launch_environment

if TYPE_CHECKING:
    from pipeline.recipe import AccelerateSettings

WAIT = "--wait"
"""Argument of an entry module in place of the job file."""


class _WaitingProcess:
    def __init__(self, module: str, settings: AccelerateSettings) -> None:
        self._module = module
        self._variables = launch_environment(settings, Path())
        del self._variables[ERROR_FILE_VARIABLE]

        # As other launched processes, in a session that Ctrl-C at a terminal does not reach.
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, WAIT],
            env=self._variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def take(
        self, command: Sequence[str], variables: Mapping[str, str], output: Path
    ) -> subprocess.Popen[bytes] | None:
        """Hand a job over; None if the command or its environment is another, or the process has ended."""
        *same, job_file = command
        if same != [sys.executable, "-m", self._module] or not self._variables.items() <= variables.items():
            return None
        order = {"variables": dict(variables), "output": str(output), "job_file": job_file}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.close()
        except BrokenPipeError:
            return None  # it has died; a process that starts now reports why
        return self._process

    def end(self) -> None:
        with self._process as process:
            process.kill()


_waiting = list[_WaitingProcess]()
"""The processes of `processes_ahead` that have no job yet."""


@contextmanager
def processes_ahead(modules: Iterable[str], settings: AccelerateSettings) -> Generator[None]:
    """Start a process of each entry module for `start_process` in the body, and end the unused ones."""
    try:
        for module in modules:
            _waiting.append(_WaitingProcess(module, settings))
        yield
    finally:
        while _waiting:
            _waiting.pop().end()


def start_process(
    command: Sequence[str], variables: Mapping[str, str], output: BinaryIO
) -> subprocess.Popen[bytes]:
    """Start a command in a new session, or hand it to a process of `processes_ahead`."""
    for waiting in list(_waiting):
        if process := waiting.take(command, variables, Path(output.name)):
            _waiting.remove(waiting)
            return process
    return subprocess.Popen(
        command, env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )


def job_file(import_libraries: Callable[[], object]) -> Path:
    """Return the path in this process's argument; with `WAIT`, after the imports, when the job exists.

    A process that waits takes over the variables and the output of its job. It ends here if the run ends, or
    needs no process.
    """
    if sys.argv[1] != WAIT:
        return Path(sys.argv[1])

    end_with_parent()
    # The job imports the same, and reports an error where its user reads it.
    with suppress(Exception):
        import_libraries()
    line = sys.stdin.buffer.readline()
    if not line:
        end_now(0)
    order = json.loads(line)
    os.environ.update(order["variables"])
    output = os.open(order["output"], os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    os.close(output)
    return Path(order["job_file"])
