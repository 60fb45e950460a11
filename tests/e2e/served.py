"""A code server as in `dagster dev`, on which the UI's GraphQL API starts and stops runs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from dagster import DagsterInstance
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import GrpcServerTarget
from dagster_graphql.test.utils import execute_dagster_graphql

SETTINGS = """\
run_coordinator: {module: dagster._core.run_coordinator, class: DefaultRunCoordinator}
telemetry: {enabled: false}
"""
"""The project's settings without the run queue, which needs the daemon."""

LAUNCH = """
mutation ($params: ExecutionParams!) {
  launchRun(executionParams: $params) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
    ... on PythonError { message }
  }
}"""

TERMINATE = """
mutation ($run: String!) {
  terminateRun(runId: $run) { __typename ... on PythonError { message } }
}"""

START_S = 120.0


class CodeServer:
    """A process that serves `assets.definitions` while the body runs; afterwards it is killed."""

    def __init__(self, home: Path, environment: dict[str, str]) -> None:
        """Create the DAGSTER_HOME `home` and use it."""
        home.mkdir()
        (home / "dagster.yaml").write_text(SETTINGS, encoding="utf-8")
        self.instance = DagsterInstance.from_config(str(home))
        self._environment = {**environment, "DAGSTER_HOME": str(home)}
        self._log = home / "server.log"
        # A socket's path may have at most 107 bytes.
        self._folder = tempfile.TemporaryDirectory()
        self._socket = str(Path(self._folder.name) / "socket")

    def __enter__(self) -> CodeServer:
        """Start the server, and wait until it responds."""
        command = [sys.executable, "-m", "dagster", "api", "grpc", "-m", "assets.definitions"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--socket", self._socket], env=self._environment, stdout=log, stderr=log
            )
        end_s = time.monotonic() + START_S
        while not Path(self._socket).exists():
            assert self._process.poll() is None, self._log.read_text("utf-8")
            assert time.monotonic() < end_s
            time.sleep(0.05)
        target = GrpcServerTarget(
            host="localhost", port=None, socket=self._socket, location_name="latentline"
        )
        self._workspace = WorkspaceProcessContext(self.instance, target)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill the server and release its resources."""
        self.kill()
        self._workspace.__exit__(kind, err, trace)
        self.instance.dispose()
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def launch(self, job: str) -> str:
        """Start a run of `job` as the UI's launchpad does, and return its id."""
        selector = {
            "repositoryLocationName": "latentline",
            "repositoryName": "__repository__",
            "jobName": job,
        }
        params = {"selector": selector, "mode": "default", "runConfigData": {}}
        return self._query(LAUNCH, params=params)["launchRun"]["run"]["runId"]

    def terminate(self, run: str) -> None:
        """Stop the run as the UI's button does; a finished run is not affected."""
        self._query(TERMINATE, run=run)

    def kill(self) -> None:
        """Kill the server's process."""
        self._process.kill()
        self._process.wait()

    def _query(self, query: str, **variables: Any) -> dict[str, Any]:
        context = self._workspace.create_request_context()
        result = execute_dagster_graphql(context, query, variables)
        assert not result.errors, result.errors
        return result.data
