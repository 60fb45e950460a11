"""Read a Parquet manifest in a separate process, with bounded memory and time.

Polars ends the process when memory is used up, and panics on some damaged files, so a manifest from a
stranger is not read in the process of the job.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import polars as pl

from pipeline.processes.limited_process import (
    MAX_WALL_S,
    Limits,
    TooSlowError,
    apply_limits,
    last_error_line,
    run_limited,
)
from pipeline.storage.os_errors import as_file_access_error, os_error_number
from pipeline.storage.regular_files import RefusedFileError

MAX_CPU_S = 120
"""Processor time after which the process is ended."""

MIN_TABLE_BYTES = 1_000_000_000
"""Memory that a manifest of any size may take."""

MAX_EXPANSION = 20
"""Memory that a large manifest may take, as a multiple of its size."""

# Each thread takes address space, which counts towards the limit.
THREADS = "4"
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

    with tempfile.TemporaryDirectory(prefix="latentline-manifest-") as folder:
        table = Path(folder, "table.arrow")
        try:
            process = run_limited(
                __name__,
                {"table": str(table)},
                file,
                Limits(max_cpu_s, max_wall_s, max_bytes),
                variables={"POLARS_MAX_THREADS": THREADS},
            )
        except TooSlowError as err:
            detail = f"reading it took more than {err} and was stopped"
            fix = "write the manifest as JSON lines or CSV"
            raise RefusedFileError("too_slow", detail, fix=fix) from err
        if process.returncode != 0:
            raise _failure(process, max_bytes)
        return pl.read_ipc(table)


def _failure(process: subprocess.CompletedProcess[bytes], max_bytes: int) -> Exception:
    # Polars aborts, or the kernel kills the process, when its memory is used up.
    if process.returncode in (-signal.SIGABRT, -signal.SIGKILL) or b"MemoryError" in process.stderr:
        detail = f"reading it needs more than {max_bytes:,} bytes of memory"
        fix = "write the manifest as JSON lines or CSV, or split it into several datasets"
        return RefusedFileError("too_much_memory", detail, fix=fix)
    line = last_error_line(process)
    # The child writes its result to a temporary folder, and the manifest is not what is wrong.
    number = os_error_number(OSError(line))
    if number is not None:
        error = OSError(number, os.strerror(number), tempfile.gettempdir())
        return as_file_access_error(error) or error
    return pl.exceptions.ComputeError(line or f"status {process.returncode}")


def main() -> None:
    """Read the standard input as Parquet and write it to the Arrow file in the arguments."""
    table = apply_limits()["table"]
    try:
        pl.read_parquet(io.BytesIO(sys.stdin.buffer.read())).write_ipc(table)
    except BaseException as err:  # Polars' panics are no Exceptions
        sys.exit(f"{type(err).__name__}: {' '.join(str(err).split())}")


if __name__ == "__main__":
    main()
