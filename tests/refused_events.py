"""An event log that refuses entries for a while: triggers in the SQLite files of a real instance."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

MESSAGE = "the database is away"

_REFUSE = f"create trigger refuse before insert on event_logs begin select raise(abort, '{MESSAGE}'); end"


@contextmanager
def events_refused(home: Path) -> Generator[None]:
    """Refuse all events of the runs that exist in the instance in `home`, until the end of the body."""
    _execute(home, _REFUSE)
    try:
        yield
    finally:
        _execute(home, "drop trigger if exists refuse")


def _execute(home: Path, statement: str) -> None:
    files = list((home / "history" / "runs").glob("*.db"))
    assert len(files) >= 2, f"the index and at least one run, got {files}"
    for file in files:
        with closing(sqlite3.connect(file, timeout=60)) as connection, connection:
            connection.execute(statement)
