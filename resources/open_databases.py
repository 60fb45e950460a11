"""One connection to each of Dagster's SQLite databases stays open during a run.

Dagster opens and closes a connection for each event. With the last open connection, SQLite copies its
write-ahead log into the database, waits three times for the disk, and deletes the log.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Engine


@contextmanager
def open_databases() -> Generator[None]:
    """Keep each SQLite database that SQLAlchemy opens in the body open until the end of the body."""
    held: dict[str, sqlite3.Connection] = {}
    lock = threading.Lock()

    def hold(connection: Any, _: object) -> None:
        # Databases of servers need none of this.
        if not isinstance(connection, sqlite3.Connection):
            return
        file = connection.execute("PRAGMA database_list").fetchone()[2]
        # A failed attempt costs time only, and the next connection repeats it.
        with lock, suppress(sqlite3.Error):
            if file not in held:
                # Threads of Dagster store events too. Without a timeout, so that it waits for no lock.
                held[file] = stack.enter_context(
                    closing(sqlite3.connect(file, timeout=0, check_same_thread=False))
                )
            # Each time, because the log of a new database exists only after its first connection.
            held[file].execute("SELECT name FROM sqlite_master").fetchone()

    with ExitStack() as stack:
        event.listen(Engine, "connect", hold)
        stack.callback(event.remove, Engine, "connect", hold)
        yield
