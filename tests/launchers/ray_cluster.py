"""A real Ray cluster of two nodes on this machine, with the loopback addresses 127.0.0.2 and 127.0.0.3.

Ray listens on all interfaces, so the cluster requires a token, which the fixture sets for all processes.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.e2e.daemon import running, until
from tests.free_ports import free_ports

NODES = ("127.0.0.2", "127.0.0.3")
NUM_CPUS = 2

STORE_BYTES = 100_000_000
"""Object store of each node; by default, it would be 30% of the machine's memory."""

STARTED = "Ray runtime started"

# Ray reads the mode when it is imported, so this module must be imported before it.
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
os.environ.update(TOKEN)


@dataclass(frozen=True)
class RayCluster:
    """A running cluster.

    Attributes:
        address: Address of the dashboard.
        variables: Environment variables of its clients.
    """

    address: str
    variables: dict[str, str]


def ray_program() -> str | None:
    """Return the path of the program `ray`, or None."""
    folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
    return shutil.which("ray", path=os.pathsep.join(folders))


@contextmanager
def ray_cluster() -> Generator[RayCluster]:
    """Run a cluster of two nodes until the end of the body."""
    port, dashboard, client = free_ports(3)
    variables = dict(TOKEN)
    # The names of sockets below this folder must be short, so it is not the test's.
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, ExitStack() as stack:
        stack.callback(_kill_all, folder)
        start = [str(ray_program()), "start", "--block", f"--num-cpus={NUM_CPUS}", "--num-gpus=0"]
        start += [f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats"]
        head = ["--head", f"--port={port}", f"--ray-client-server-port={client}", f"--temp-dir={folder}/ray"]
        head += ["--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
        for node, options in zip(NODES, (head, [f"--address={NODES[0]}:{port}"]), strict=True):
            log = Path(folder, f"{node}.txt")
            started = running(
                [*start, *options, f"--node-ip-address={node}"],
                # Ray's own reports of usage are off, and processes of this cluster can be recognised.
                environment={**os.environ, **variables, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TEST": folder},
                cwd=Path(folder),
                log=log,
            )
            stack.enter_context(started)
            until(lambda log=log: STARTED in log.read_text(), f"node {node}", seconds=240, log=log)
        yield RayCluster(f"http://127.0.0.1:{dashboard}", variables)


def _kill_all(folder: str) -> None:
    """Kill what is left of the cluster whose folder this is."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAY_TEST") == folder:
                process.kill()
        except psutil.Error:
            continue
