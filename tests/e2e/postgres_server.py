"""A PostgreSQL server of the system's package, with its own data folder and port."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

PASSWORD = "the password of a test"
USER = "latentline"


def programs() -> Path | None:
    """Return the folder of PostgreSQL's programs; Debian keeps them out of PATH."""
    found = shutil.which("pg_ctl")
    if found is not None:
        return Path(found).parent
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"))
    return installed[-1].parent if installed else None


class PostgresServer:
    """A server that can be stopped and started again, on 127.0.0.1 or another address of this host.

    PostgreSQL refuses to run as root; then it runs as the user `postgres` of its package.
    """

    def __init__(self, bin_folder: Path, folder: Path, *, host: str = "127.0.0.1") -> None:
        """Create the data folder below `folder`."""
        self._bin, self._folder, self.host = bin_folder, folder, host
        self._user = "postgres" if os.geteuid() == 0 else None
        with socket.socket() as probe:
            probe.bind((host, 0))
            self.port: int = probe.getsockname()[1]
        if self._user is not None:
            shutil.chown(folder, self._user)

        password_file = folder / "password"
        password_file.write_text(PASSWORD, encoding="utf-8")
        self._call("initdb", "-D", "data", "-U", USER, f"--pwfile={password_file}", "-A", "scram-sha-256")
        password_file.unlink()
        with (folder / "data" / "pg_hba.conf").open("a", encoding="ascii") as file:
            file.write("host all all samenet scram-sha-256\n")

    def start(self) -> None:
        """Start the server, and return when it accepts connections."""
        options = f"-p {self.port} -c listen_addresses={self.host} -c unix_socket_directories="
        self._call("pg_ctl", "-D", "data", "-l", "log", "-o", options, "-w", "start")

    def stop(self) -> None:
        """End all connections and stop the server, if it runs."""
        if not (self._folder / "data" / "postmaster.pid").exists():
            return
        self._call("pg_ctl", "-D", "data", "-m", "immediate", "-w", "stop")

    def create(self, name: str) -> None:
        """Create an empty database."""
        self.execute(f"create database {name}")

    def execute(self, statement: str) -> None:
        """Execute a statement in the database `postgres`."""
        import psycopg2

        connection = psycopg2.connect(
            host=self.host, port=self.port, user=USER, password=PASSWORD, dbname="postgres"
        )
        try:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(statement)
        finally:
            connection.close()

    def _call(self, program: str, *arguments: str) -> None:
        command = [str(self._bin / program), *arguments]
        subprocess.run(
            command, check=True, cwd=self._folder, user=self._user, stdout=subprocess.DEVNULL, timeout=60
        )


@contextmanager
def postgres_server(bin_folder: Path, *, host: str = "127.0.0.1") -> Generator[PostgresServer]:
    """Provide a running server, and remove it and its data after the body."""
    with tempfile.TemporaryDirectory(prefix="postgres") as folder:
        server = PostgresServer(bin_folder, Path(folder), host=host)
        server.start()
        try:
            yield server
        finally:
            server.stop()
