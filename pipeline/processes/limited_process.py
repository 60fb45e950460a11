"""Run a module in a process with limited memory and processor time.

A decoder that reads a stranger's file may crash, or use up memory or time. Python cannot end a thread inside
a decoder, but the system can end a process, and a crash does not take the job with it.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

import psutil

MAX_WALL_S = 600.0
"""Time after which a process is ended, however much of it was spent waiting."""


class Limits(NamedTuple):
    """Limits of a process.

    Attributes:
        max_cpu_s: Processor time after which the process is ended. It does not depend on the load of the
            machine.
        max_wall_s: Time after which the process is ended.
        max_bytes: Memory that the process may take after its start; None for any.
    """

    max_cpu_s: int
    max_wall_s: float = MAX_WALL_S
    max_bytes: int | None = None


class TooSlowError(Exception):
    """The process was ended after a time limit; the text is the limit, such as "20 s of processor time"."""


def run_limited(
    module: str,
    arguments: Mapping[str, Any],
    content: BinaryIO,
    limits: Limits,
    *,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a module, which must begin with `apply_limits`, and return its status and output.

    `arguments` are JSON values for the module. `content`, an opened file or a file in memory, becomes the
    standard input. `variables` are added to the environment.

    Raises:
        TooSlowError: The process reached a time limit.
    """
    # Not in the limited process, which would import the recipe's schema for longer than Polars.
    from pipeline.processes.launch import python_path

    # A file of an address is in memory, and a process cannot inherit it as a descriptor.
    source: dict[str, Any] = (
        {"input": content.getvalue()} if isinstance(content, io.BytesIO) else {"stdin": content}
    )

    # With -P, modules in the working folder are not imported.
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-m", module, json.dumps(limits), json.dumps(arguments)],
            **source,
            env={**os.environ, "PYTHONPATH": python_path(), **(variables or {})},
            capture_output=True,
            timeout=limits.max_wall_s,
            check=False,
        )
    except subprocess.TimeoutExpired as err:
        raise TooSlowError(f"{limits.max_wall_s:g} s") from err
    if process.returncode == -signal.SIGXCPU:
        raise TooSlowError(f"{limits.max_cpu_s} s of processor time")
    return process


def apply_limits() -> dict[str, Any]:
    """Limit this process as `run_limited` requests, and return the arguments."""
    values, arguments = (json.loads(argument) for argument in sys.argv[1:])
    limits = Limits(*values)

    # A decoder that crashes must not leave a core dump of gigabytes.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    # The hard limit is one second later, because reaching it kills with a signal that looks like missing
    # memory.
    resource.setrlimit(resource.RLIMIT_CPU, (limits.max_cpu_s, limits.max_cpu_s + 1))
    if limits.max_bytes is not None:
        # The limit covers all address space, also what the imported libraries have taken before.
        max_address_bytes = psutil.Process().memory_info().vms + limits.max_bytes
        resource.setrlimit(resource.RLIMIT_AS, (max_address_bytes, max_address_bytes))
    return arguments


def last_error_line(process: subprocess.CompletedProcess[bytes]) -> str:
    """Return the last line that the process wrote to its standard error; empty if there is none."""
    return process.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2][:500]
