"""Read a Parquet manifest in a separate process, with bounded memory and time.

Polars ends the process when memory is used up, and panics on some damaged files, so a manifest from a
stranger is not read in the process of the job.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import polars as pl
import psutil

from pipeline.storage.regular_files import RefusedFileError

# Unlike the time of a clock, it does not depend on the load of the machine.
MAX_CPU_S = 120
"""Processor time after which the process is ended."""

MAX_WALL_S = 600
"""Time after which the process is ended, however much of it was spent waiting."""

MIN_TABLE_BYTES = 1_000_000_000
"""Memory that a manifest of any size may take."""

MAX_EXPANSION = 20
"""Memory that a large manifest may take, as a multiple of its size."""

# Each thread takes address space, which counts towards the limit.
_THREADS = "4"
"""Threads of Polars in the process."""


def read_parquet(
    file: io.BufferedReader | io.BytesIO,
    *,
    max_cpu_s: int = MAX_CPU_S,
    max_wall_s: float = MAX_WALL_S,
    min_table_bytes: int = MIN_TABLE_BYTES,
) -> pl.DataFrame:
    """Return the table in an opened Parquet file.

    Raises:
        RefusedFileError: Reading it needs too much memory (`too_much_memory`) or time (`too_slow`).
        pl.exceptions.ComputeError: The file is damaged, or is not a Parquet file.
    """
    is_local = isinstance(file, io.BufferedReader)
    num_bytes = os.fstat(file.fileno()).st_size if is_local else len(file.getvalue())

    # The size of the file is no limit of the table: 170 kB of Parquet can hold 14 GB of text.
    max_bytes = max(min_table_bytes, MAX_EXPANSION * num_bytes)
    source: dict[str, Any] = {"stdin": file} if is_local else {"input": file.getvalue()}

    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory(prefix="latentline-manifest-") as folder:
        table = Path(folder, "table.arrow")
        arguments = {"table": str(table), "max_bytes": max_bytes, "max_cpu_s": max_cpu_s}

        # With -P, modules in the working folder are not imported.
        try:
            process = subprocess.run(
                [sys.executable, "-P", "-m", __name__, json.dumps(arguments)],
                **source,
                env={**os.environ, "PYTHONPATH": path, "POLARS_MAX_THREADS": _THREADS},
                capture_output=True,
                timeout=max_wall_s,
                check=False,
            )
        except subprocess.TimeoutExpired as err:
            raise _too_slow(f"{max_wall_s:g} s") from err
        if process.returncode != 0:
            raise _failure(process.returncode, process.stderr.decode("utf-8", "replace"), arguments)
        return pl.read_ipc(table)


def _failure(status: int, errors: str, limits: dict[str, Any]) -> Exception:
    """Return the error for a process that ended without a table."""
    if status == -signal.SIGXCPU:
        return _too_slow(f"{limits['max_cpu_s']} s of processor time")
    if status in (-signal.SIGABRT, -signal.SIGKILL) or "MemoryError" in errors:
        detail = f"reading it needs more than {limits['max_bytes']:,} bytes of memory"
        fix = "write the manifest as JSON lines or CSV, or split it into several datasets"
        return RefusedFileError("too_much_memory", detail, fix=fix)
    return pl.exceptions.ComputeError(errors.strip().rpartition("\n")[2][:500] or f"status {status}")


def _too_slow(limit: str) -> RefusedFileError:
    detail = f"reading it took more than {limit} and was stopped"
    return RefusedFileError("too_slow", detail, fix="write the manifest as JSON lines or CSV")


def main() -> None:
    """Read the standard input as Parquet and write it to the Arrow file in the first argument."""
    arguments = json.loads(sys.argv[1])
    max_cpu_s = int(arguments["max_cpu_s"])

    # The limit covers all address space, also what the imported libraries have taken before.
    max_bytes = psutil.Process().memory_info().vms + int(arguments["max_bytes"])

    # The hard limit is one second later, because reaching it kills with a signal that looks like missing
    # memory.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (max_cpu_s, max_cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    try:
        pl.read_parquet(io.BytesIO(sys.stdin.buffer.read())).write_ipc(arguments["table"])
    except BaseException as err:  # Polars' panics are no Exceptions
        sys.exit(f"{type(err).__name__}: {' '.join(str(err).split())}")


if __name__ == "__main__":
    main()
