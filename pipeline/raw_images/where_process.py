"""Apply `filters.where` in a separate process, with bounded memory and time.

An expression with few words can multiply the texts of a manifest, and deep nesting ends the process that
parses it, so an expression is not evaluated in the process of the job.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Iterator

import polars as pl

from pipeline.processes.limited_process import (
    Limits,
    TooSlowError,
    apply_limits,
    last_error_line,
    run_limited,
)
from pipeline.raw_images.parquet_process import MAX_CPU_S, MAX_EXPANSION, MIN_TABLE_BYTES, THREADS

_ROW = "\0row"
"""Column with the number of a row; a name that no expression can contain."""


def rows_where(where: str, table: pl.DataFrame, *, path_column: str) -> pl.Series:
    """Return for each row of a manifest whether a checked `filters.where` is true.

    Raises:
        ValueError: It is not a boolean expression over the columns, or needs too much memory or time.
    """
    # Not in the limited process, which would import the recipe's schema for longer than Polars.
    from pipeline.recipe.where_expression import expression_over

    # The path column gives an expression without columns, such as TRUE, its number of rows.
    expression, used = expression_over(where, {*table.columns, *_field_names(table.schema.values())})
    columns = [name for name in table.columns if name in used or name == path_column]
    content = io.BytesIO()

    # An argument of a process has at most 128 kB.
    content.write(json.dumps(expression).encode("ascii") + b"\n")
    table.select(columns).write_ipc(content)

    max_bytes = max(MIN_TABLE_BYTES, MAX_EXPANSION * len(content.getvalue()))
    try:
        process = run_limited(
            __name__,
            {},
            content,
            Limits(MAX_CPU_S, max_bytes=max_bytes),
            variables={"POLARS_MAX_THREADS": THREADS, "RUST_BACKTRACE": "0"},
        )
    except TooSlowError as err:
        raise ValueError(f"it took more than {err} and was stopped") from err
    if process.returncode < 0 or b"MemoryError" in process.stderr:
        # The system ends a process that lacks memory, also memory for deep nesting.
        raise ValueError(f"it is nested too deeply, or needs more than {max_bytes:,} bytes of memory")
    if process.returncode != 0:
        raise ValueError(last_error_line(process))
    rows = pl.read_ipc(io.BytesIO(process.stdout))[_ROW]
    return pl.arange(table.height, eager=True).is_in(rows.implode())


def _field_names(kinds: Iterable[object]) -> Iterator[str]:
    """Yield the names of the fields of structs, which an expression names as `column.field`."""
    for kind in kinds:
        if isinstance(kind, pl.Struct):
            yield from (field.name for field in kind.fields)
            yield from _field_names(kind.to_schema().values())


def main() -> None:
    """Read expression and columns from the standard input, and write the numbers of the selected rows."""
    apply_limits()
    expression = json.loads(sys.stdin.buffer.readline())
    try:
        table = pl.read_ipc(io.BytesIO(sys.stdin.buffer.read())).with_row_index(_ROW)
        table.filter(pl.sql_expr(expression)).select(_ROW).write_ipc(sys.stdout.buffer)
    except BaseException as err:  # Polars' panics are no Exceptions
        sys.exit(" ".join(str(err).split()))


if __name__ == "__main__":
    main()
