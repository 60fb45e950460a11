"""Two machines on this host with a network, PostgreSQL and Ceph's S3 gateway.

The services start once per session. The machines and their disks belong to one test.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Generator
from functools import lru_cache
from pathlib import Path

import fsspec
import pytest
from dagster import DagsterInstance

from tests.e2e import postgres_server as postgres
from tests.machines import ceph
from tests.machines.counting_proxy import CountingProxy
from tests.machines.machine import Machine, machines
from tests.machines.network import Network, reason_to_skip
from tests.machines.pair import Pair
from tests.machines.project import Project

_STORAGE = """
storage:
  postgres:
    postgres_db:
      hostname: {host}
      port: {port}
      username: {{env: DAGSTER_PG_USER}}
      password: {{env: DAGSTER_PG_PASSWORD}}
      db_name: {name}
      scheme: postgresql+psycopg2
"""


@lru_cache
def _reason_to_skip() -> str | None:
    if missing := ceph.missing_programs():
        return f"Debian's packages radosgw, ceph-mon, ceph-osd and ceph-common lack: {', '.join(missing)}"
    return reason_to_skip()


@pytest.fixture(scope="session")
def network() -> Generator[Network]:
    """The network of this session's machines and services."""
    if reason := _reason_to_skip():
        pytest.skip(reason)
    network = Network()
    yield network
    network.close()


@pytest.fixture(scope="session")
def gateway(network: Network) -> Generator[ceph.Gateway]:
    """Ceph's S3 gateway; a test that stops it must start it again."""
    with tempfile.TemporaryDirectory(prefix="ceph") as folder:
        gateway = ceph.Gateway(Path(folder), host=network.host)
        yield gateway
        gateway.close()


@pytest.fixture(scope="session")
def database(network: Network) -> Generator[postgres.PostgresServer]:
    """A PostgreSQL server; a test that stops it must start it again."""
    programs = postgres.programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed")
    with postgres.postgres_server(programs, host=network.host) as server:
        yield server


@pytest.fixture
def s3(gateway: ceph.Gateway, monkeypatch: pytest.MonkeyPatch) -> str:
    """Set this process's environment to the gateway, and return the address of a new bucket."""
    for name, value in gateway.environment().items():
        monkeypatch.setenv(name, value)
    bucket = f"test-{uuid.uuid4().hex[:8]}"
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
    return f"s3://{bucket}"


@pytest.fixture
def proxy(network: Network, gateway: ceph.Gateway) -> Generator[CountingProxy]:
    """A proxy in front of the gateway; machines use it, this process does not."""
    proxy = CountingProxy(network.host, gateway.url)
    yield proxy
    proxy.close()


@pytest.fixture
def two_machines(network: Network, tmp_path: Path) -> Generator[list[Machine]]:
    """Two running machines, `a` and `b`."""
    with machines("a", "b", folder=tmp_path, network=network, environment={}) as started:
        yield started


@pytest.fixture
def pair(
    two_machines: list[Machine],
    s3: str,
    proxy: CountingProxy,
    database: postgres.PostgresServer,
    tiny_sd: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Generator[Pair]:
    """Two machines with a project each, after `dagster instance info`."""
    name = f"dagster_{uuid.uuid4().hex[:8]}"
    database.create(name)
    storage = _STORAGE.format(host=database.host, port=database.port, name=name)
    login = {"DAGSTER_PG_USER": postgres.USER, "DAGSTER_PG_PASSWORD": postgres.PASSWORD}
    environment = {**login, **ceph.environment(proxy.url)}

    projects = [Project(machine, tiny_sd, f"{s3}/cache", environment) for machine in two_machines]
    for project in projects:
        project.prepare(storage)
    for variable, value in login.items():
        monkeypatch.setenv(variable, value)
    with DagsterInstance.from_config(str(two_machines[0].path("dagster"))) as instance:
        yield Pair(*projects, instance, proxy)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests here as slow, and allow them more time: two machines share the processors of one."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.machines)
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(1800))
