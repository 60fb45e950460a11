"""The services of deploy/compose.yaml as processes of this machine, with their commands and variables."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ruamel.yaml import YAML

from tests.e2e.daemon import ROOT, running, until
from tests.e2e.postgres_server import PASSWORD, USER, postgres_server, programs
from tests.e2e.served import LAUNCH
from tests.free_ports import free_port

if TYPE_CHECKING:
    from tests.e2e.workspace import Workspace

BIN = programs()
DEPLOY = ROOT / "deploy"
SERVICES: dict[str, Any] = YAML(typ="safe").load(DEPLOY / "compose.yaml")["services"]

OTHER_HOST = ["unshare", "--uts", "sh", "-c", 'hostname latentline-code && exec "$@"', "sh"]
"""Start of a command in a container's host name, so that the daemon takes it for another machine."""

STATUS = """
query ($run: ID!) { runOrError(runId: $run) { __typename ... on Run { status tags { key value } } } }"""

NEWEST = "query { runsOrError(limit: 1) { ... on Runs { results { runId parentRunId } } } }"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(BIN is None, reason="PostgreSQL is not installed"),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare for a host name"
    ),
]


@dataclass(frozen=True)
class Stack:
    """The services with a workspace's recipe.

    Attributes:
        workspace: Its folder has the logs, and DAGSTER_HOME as `home`.
        ports: Port of each service.
    """

    workspace: Workspace
    ports: dict[str, int]

    def command(self, service: str) -> list[str]:
        """Return the command of a service with this machine's addresses and paths."""
        replaced = {
            "0.0.0.0": "127.0.0.1",
            "4000": str(self.ports["code"]),
            "3000": str(self.ports["webserver"]),
            "/app/workspace.yaml": str(DEPLOY / "workspace.yaml"),
        }
        command = [
            " ".join(replaced.get(word, word) for word in part.split(" "))
            for part in SERVICES[service]["command"]
        ]
        return [*OTHER_HOST, *command] if service == "code" else command

    def environment(self, service: str) -> dict[str, str]:
        """Return the variables of a service with this machine's addresses and paths."""
        here = {
            "DAGSTER_PG_HOST": "127.0.0.1",
            "DAGSTER_PG_PORT": str(self.ports["postgres"]),
            "DAGSTER_PG_DB": "postgres",
            "DAGSTER_PG_USER": USER,
            "DAGSTER_PG_PASSWORD": PASSWORD,
            "LATENTLINE_CODE_HOST": "127.0.0.1",
            "LATENTLINE_CODE_PORT": str(self.ports["code"]),
            "LATENTLINE_CONFIGS": str(self.workspace.file.parent),
        }
        chosen = {
            name: here[name] for name, value in SERVICES[service]["environment"].items() if value is not None
        }
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("DAGSTER", "LATENTLINE"))
        }
        return {**inherited, **chosen, "PATH": path, "DAGSTER_HOME": str(self.workspace.root / "home")}

    def log(self, service: str) -> Path:
        return self.workspace.root / f"{service}.log"

    @contextmanager
    def service(self, name: str) -> Generator[int]:
        """Run a service during the body, and provide its process id."""
        command, environment = self.command(name), self.environment(name)
        with running(command, environment=environment, cwd=self.workspace.root, log=self.log(name)) as pid:
            yield pid

    def wait_for_code(self) -> None:
        """Wait until the health check of the compose file succeeds."""
        _, *check = SERVICES["code"]["healthcheck"]["test"]
        command = [str(self.ports["code"]) if word == "4000" else word for word in check]
        environment = self.environment("code")

        def is_healthy() -> bool:
            completed = subprocess.run(command, env=environment, capture_output=True, check=False)
            return completed.returncode == 0

        until(is_healthy, "the code server", seconds=240, log=self.log("code"))

    def query(self, query: str, **variables: Any) -> dict[str, Any]:
        """Return the webserver's response to a GraphQL query."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports['webserver']}/graphql",
            data=json.dumps({"query": query, "variables": variables}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            result = json.load(response)
        assert not result.get("errors"), result["errors"]
        return result["data"]

    def wait_for_webserver(self) -> None:
        def responds() -> bool:
            try:
                return bool(self.query("{ version }"))
            except (urllib.error.URLError, ConnectionError):
                return False

        until(responds, "the webserver", seconds=240, log=self.log("webserver"))

    def launch(self, job: str) -> str:
        """Start a job as the UI does, as soon as the code location is loaded, and return the run's id."""
        selector = {
            "repositoryLocationName": "latentline",
            "repositoryName": "__repository__",
            "jobName": job,
        }
        params = {"selector": selector, "mode": "default", "runConfigData": {}}
        launched: dict[str, Any] = {}

        def is_launched() -> bool:
            launched.update(self.query(LAUNCH, params=params)["launchRun"])
            return launched["__typename"] == "LaunchRunSuccess"

        until(is_launched, f"the launch of {job}", seconds=120, log=self.log("webserver"))
        return launched["run"]["runId"]

    def run(self, run_id: str) -> dict[str, Any]:
        """Return status and tags of a run."""
        return self.query(STATUS, run=run_id)["runOrError"]

    def newest_run(self) -> dict[str, Any]:
        """Return the ids of the newest run and of the run that it repeats."""
        return self.query(NEWEST)["runsOrError"]["results"][0]

    def wait_for(self, run_id: str, status: str) -> None:
        """Wait until the run has the status; fail if it has ended with another one."""

        def has_status() -> bool:
            current = self.run(run_id)["status"]
            assert current == status or current not in {"SUCCESS", "FAILURE", "CANCELED"}, current
            return current == status

        until(has_status, f"{status} of {run_id}", seconds=300, log=self.log("code"))


@pytest.fixture
def stack(cached: Workspace) -> Generator[Stack]:
    """Provide PostgreSQL, the webserver and the daemon with the project's configuration files."""
    assert BIN is not None
    home = cached.root / "home"
    home.mkdir()
    shutil.copy(DEPLOY / "dagster.yaml", home)
    with postgres_server(BIN) as server:
        ports = {"postgres": server.port, "code": free_port(), "webserver": free_port()}
        yield Stack(cached, ports)


def test_a_job_of_the_ui_runs_in_the_code_server(stack: Stack) -> None:
    with stack.service("code"):
        stack.wait_for_code()
        with stack.service("webserver"), stack.service("daemon"):
            stack.wait_for_webserver()
            run_id = stack.launch("small_cache")
            stack.wait_for(run_id, "SUCCESS")
            tags = {tag["key"]: tag["value"] for tag in stack.run(run_id)["tags"]}
    assert tags["latentline/machine"] == SERVICES["code"]["hostname"]
    logs = "".join(stack.log(name).read_text("utf-8") for name in ("code", "webserver", "daemon"))
    assert PASSWORD not in logs
    assert not (stack.workspace.root / "home" / "history").exists(), "nothing is in SQLite files"


def test_O08_a_new_container_of_the_code_server_ends_the_runs_of_the_old_one_and_dagster_starts_them_again(
    stack: Stack,
) -> None:
    stack.workspace.recipe(
        training={
            "steps": 100_000,
            "batch_size": 2,
            "checkpoint_every": 50_000,
            "sample_every": 0,
            "lora": {"rank": 2, "alpha": 2.0},
        }
    )
    with stack.service("code") as pid:
        # As in the compose file, the others start once it is healthy: it creates the tables of the database.
        stack.wait_for_code()
        with stack.service("webserver"), stack.service("daemon"):
            stack.wait_for_webserver()
            endless = stack.launch("small_train")
            stack.wait_for(endless, "STARTED")
            until(
                lambda: any(
                    file.stat().st_size for file in stack.workspace.out.glob("runs/*/logs/metrics.jsonl")
                ),
                "the first steps",
                seconds=240,
                log=stack.log("code"),
            )
            os.killpg(pid, signal.SIGKILL)
            time.sleep(15)
            assert stack.run(endless)["status"] == "STARTED", (
                "the daemon cannot see the processes of the container"
            )

            with stack.service("code"):
                stack.wait_for_code()
                stack.wait_for(endless, "FAILURE")
                until(
                    lambda: stack.newest_run()["parentRunId"] == endless,
                    "the retry of the daemon",
                    seconds=120,
                    log=stack.log("daemon"),
                )
                stack.wait_for(stack.newest_run()["runId"], "STARTED")
