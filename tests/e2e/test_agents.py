"""docs/agents.md: what an agent can and cannot do through dagster-mcp, with a real server and web server.

dagster-mcp needs Python 3.12, so it is in an environment of its own. LATENTLINE_DAGSTER_MCP is its command.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from dagster import DagsterInstance

from tests.e2e.mcp_client import McpClient
from tests.e2e.served import SETTINGS
from tests.free_ports import free_port

COMMAND = os.environ.get("LATENTLINE_DAGSTER_MCP") or shutil.which("dagster-mcp")

WRITING = {
    *("materialize_assets", "backfill_assets", "launch_job", "launch_job_with_partitions", "terminate_run"),
    *("start_schedule", "stop_schedule", "start_sensor", "stop_sensor", "reload_code_location"),
}

ENDED = {"SUCCESS", "FAILURE", "CANCELED"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1_200),
    pytest.mark.skipif(COMMAND is None, reason="needs dagster-mcp, see docs/agents.md"),
]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "dagster.yaml").write_text(SETTINGS, encoding="utf-8")
    return folder


@contextmanager
def agent(workspace: Any, home: Path, *options: str, read_only: bool) -> Generator[McpClient]:
    """Start a web server with these options, and an MCP server for it."""
    port = free_port()
    command = [sys.executable, "-m", "dagster_webserver", "-m", "assets.definitions"]
    environment = {**workspace.environment(), "DAGSTER_HOME": str(home)}
    with subprocess.Popen(
        [*command, "-h", "127.0.0.1", "-p", str(port), *options], cwd=workspace.root, env=environment
    ) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: responds(f"{url}/server_info"))
            variables = {"DAGSTER_URL": url, "DAGSTER_READ_ONLY": str(read_only).lower()}
            with McpClient([str(COMMAND)], {**os.environ, **variables}) as client:
                yield client
        finally:
            server.terminate()


def until(condition: Callable[[], Any], *, seconds: float = 600) -> Any:
    end_s = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end_s, "timed out"
        time.sleep(0.5)
    return value


def responds(url: str) -> bool:
    try:
        with urlopen(url, timeout=60):
            return True
    except (URLError, OSError):
        return False


def status_of(client: McpClient, run_id: str) -> str | None:
    status = client.call("get_run_status", run_id=run_id)["status"]
    return status if status in ENDED else None


def test_an_agent_finds_the_cause_of_a_closed_gate_and_cannot_train_past_it(cached, home) -> None:
    (cached.data / "photo1.txt").unlink()
    with agent(cached, home, read_only=False) as client:
        assert client.tools() >= WRITING
        jobs = {job["job"] for job in client.call("list_jobs")}
        assert jobs >= {"small_cache", "small_train"}

        location = client.call("list_code_locations")[0]["name"]
        run = client.call("launch_job", job_name="small_cache", repository_location=location)
        assert until(lambda: status_of(client, run["run"]["runId"])) == "FAILURE"
        summary = str(client.call("get_run_failure_summary", run_id=run["run"]["runId"]))
        assert "captions_present" in summary
        assert "photo1" in summary

        alone = client.call(
            "launch_job",
            job_name="small_train",
            repository_location=location,
            asset_keys=["small/trained_lora"],
        )
        assert until(lambda: status_of(client, alone["run"]["runId"])) == "FAILURE"
        assert not list(cached.out.glob("lora/*.safetensors"))


def test_an_agent_that_watches_has_no_tool_that_writes_and_a_server_that_refuses(cached, home) -> None:
    with agent(cached, home, "--read-only", read_only=True) as client:
        assert not client.tools() & WRITING
        assert client.call("get_instance_status")
        assert len(client.call("search_assets", group="small")) >= 6

    # Also if the agent has started the MCP server with other settings.
    with agent(cached, home, "--read-only", read_only=False) as client:
        location = client.call("list_code_locations")[0]["name"]
        with pytest.raises(RuntimeError, match=r"(?i)permission|unauthorized"):
            client.call("launch_job", job_name="small_cache", repository_location=location)
    with DagsterInstance.from_config(str(home)) as instance:
        assert instance.get_runs_count() == 0
