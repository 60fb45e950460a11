"""One process that imports torch, diffusers and transformers once, and forks a process for each job.

A training imports them for as long as Dagster loads and the stages compare their files, and both encoders
import the same again. The server starts first and imports once:

    run      starts the server, works, and sends each job as a line of JSON with its module and variables
    server   imports, forks a process for the job, and at its end writes its exit status into a file
    process  answers with its id, and continues as if `python -m <module> <job file>` had just started

Each process has its own exit status, session and output, and its end frees its memory and its GPU. Only the
imports are shared, also in memory. The server itself becomes the last process of a run, because a server
that waits keeps about 120 MB. `multiprocessing` has such a server too, but each process would import the main
module of its run, which for most runs is Dagster's command.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from pipeline.processes.launch import ERROR_FILE_VARIABLE, launch_environment

if TYPE_CHECKING:
    from pipeline.recipe import AccelerateSettings

SERVER_MODULE = "pipeline.processes.worker.fork_server"
"""Entry module of the server. The command line of each process that it forks has it too."""

_POLL_S = 0.01

# Polars adds its defaults when this process imports it, perhaps after the start of the server.
_POLARS_VARIABLE = "_RJEM_MALLOC_CONF"


class StartedProcess(Protocol):
    """The part of `subprocess.Popen` that launchers use."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit status, or minus the number of a signal; None while the process runs."""
        ...

    def wait(self) -> int:
        """Wait for the end, and return the exit status."""
        ...


class _ForkedProcess:
    def __init__(self, pid: int, server: subprocess.Popen[bytes], status_file: Path) -> None:
        self.pid = pid
        self._server = server
        self._status_file = status_file
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            # First, because the server may end after it has written the file.
            lost_status = self._server.poll()
            if self._status_file.exists():
                self._status = int(self._status_file.read_bytes())
            else:
                self._status = lost_status  # without the server, the process ends too
        return self._status

    def wait(self) -> int:
        while (status := self.poll()) is None:
            time.sleep(_POLL_S)
        return status


class _Server:
    def __init__(self, modules: Iterable[str], settings: AccelerateSettings, last: str | None) -> None:
        variables = launch_environment(settings, Path())
        del variables[ERROR_FILE_VARIABLE]
        self._variables = {name: variables[name] for name in variables if name != _POLARS_VARIABLE}

        # As other launched processes, in a session that Ctrl-C at a terminal does not reach.
        self._process = subprocess.Popen(
            [sys.executable, "-m", SERVER_MODULE, *modules],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._lock = threading.Lock()
        self._last_module = last
        self._latest: StartedProcess | None = None

    def start(
        self, command: Sequence[str], variables: Mapping[str, str], output: Path
    ) -> StartedProcess | None:
        """Fork a process after the imports; None if it needs another environment, or another one runs."""
        *python, module, job_file = command
        # Libraries have read their variables when they were imported.
        if python != [sys.executable, "-m"] or not self._variables.items() <= variables.items():
            return None
        # A sweep may start trainings from several threads.
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self._fork(module, job_file, variables, output)
        finally:
            self._lock.release()

    def _fork(
        self, module: str, job_file: str, variables: Mapping[str, str], output: Path
    ) -> StartedProcess | None:
        if self._latest is not None and self._latest.poll() is None:
            return None

        orders, answers = self._process.stdin, self._process.stdout
        assert orders is not None
        assert answers is not None
        status_file = output.with_name(f"{output.name}.status")
        order = {
            "module": module,
            "job_file": job_file,
            "variables": dict(variables),
            "output": str(output),
            "status_file": str(status_file),
            "is_last": module == self._last_module,
        }
        try:
            orders.write(json.dumps(order).encode() + b"\n")
            orders.flush()
            pid = answers.readline()
        except BrokenPipeError:
            return None  # it has died, and a process that starts now reports why
        # Ctrl-C during the imports, after which it would start the job.
        except BaseException:
            self._process.kill()
            raise
        if not pid:
            return None
        is_server = int(pid) == self._process.pid
        self._latest = self._process if is_server else _ForkedProcess(int(pid), self._process, status_file)
        return self._latest

    def end(self) -> None:
        # An order that a dead server has not read is still in the buffer.
        with suppress(BrokenPipeError), self._process as process:
            process.kill()


_servers = list[_Server]()
"""The server of `fork_server`, at most one."""


@contextmanager
def fork_server(
    modules: Sequence[str], settings: AccelerateSettings, *, last: str | None = None
) -> Generator[None]:
    """Import the libraries of entry modules, for each `start_process` in the body.

    `last` is the entry module of which no process is followed by another; None if there may be more. Without
    modules, within another such context, and on systems other than Linux, nothing happens.
    """
    # macOS' own libraries do not work in forked processes.
    if not modules or _servers or sys.platform != "linux":
        yield
        return
    _servers.append(_Server(modules, settings, last))
    try:
        yield
    finally:
        _servers.pop().end()


def start_process(command: Sequence[str], variables: Mapping[str, str], output: BinaryIO) -> StartedProcess:
    """Start a command in a new session, or fork it from the server of `fork_server`."""
    for server in _servers:
        if process := server.start(command, variables, Path(output.name)):
            return process
    return subprocess.Popen(
        command, env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
