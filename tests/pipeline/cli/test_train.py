"""`latentline train`: its job, its machines, and the errors of machines that do not meet."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from pipeline.cli.train import command
from pipeline.errors import LaunchError, TrainingError
from pipeline.recipe import recipe_from_mapping
from tests.free_ports import free_port
from tests.waiting import until

RUN = "0123456789abcdef"


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    """The job file of two processes; its inputs are not read before the machines meet."""
    values = {
        "datasets": [{"name": "photos", "path": tmp_path / "photos"}],
        "output_dir": tmp_path / "output",
        "cache_dir": tmp_path,
        "model": {"base": "no/model"},
        "accelerate": {"num_processes": 2},
    }
    recipe = recipe_from_mapping("demo", values)
    folder = tmp_path / "output" / "runs" / RUN
    folder.mkdir(parents=True)
    job: dict[str, Any] = {"recipe": recipe.model_dump(mode="json"), "prompts": [], "run": RUN}
    job |= {"base": str(tmp_path), "elsewhere": {}}
    (folder / "order.json").write_text(json.dumps(job), encoding="utf-8")
    (folder / "inputs.parquet").write_bytes(b"")
    return folder / "order.json"


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def train(*arguments: object) -> subprocess.CompletedProcess[str]:
    latentline = [sys.executable, "-c", "from pipeline.cli.main import main; main()", "train"]
    return subprocess.run(
        [*latentline, *map(str, arguments)],
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_job_that_is_not_on_this_machine_is_an_error(tmp_path: Path, job_file: Path) -> None:
    missing = invoke(tmp_path / "order.json").exception
    assert isinstance(missing, TrainingError)
    assert missing.what == "order.json does not exist at this path or address"

    (job_file.parent / "inputs.parquet").unlink()
    incomplete = invoke(job_file.parent).exception
    assert isinstance(incomplete, TrainingError)
    assert incomplete.what == "inputs.parquet does not exist at this path or address"
    assert "copy order.json and inputs.parquet" in incomplete.fix


def test_processes_that_the_machines_cannot_share_equally_are_an_error(job_file: Path) -> None:
    error = invoke(job_file, "--machines", 3, "--rank", 0, "--master", "a:1").exception
    assert isinstance(error, LaunchError)
    assert "must be divisible by the number of machines, got 2 on 3 machines" in error.what


@pytest.mark.slow
def test_a_machine_without_the_others_ends_with_the_address_and_a_fix(job_file: Path) -> None:
    port = free_port()
    alone = train(job_file, "--machines", 2, "--rank", 0, "--master", f"127.0.0.1:{port}", "--wait", 1)
    assert alone.returncode == 1
    assert "LaunchError: not all other machines connected within 1 s" in alone.stderr
    assert f"machine 0 of 2, --master 127.0.0.1:{port}" in alone.stderr
    assert "start latentline train on every machine" in alone.stderr
    assert alone.stderr.count("LaunchError") == 1


@pytest.mark.slow
def test_a_machine_that_cannot_reach_machine_0_ends_with_the_address_and_a_fix(job_file: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    alone = train(job_file, "--machines", 2, "--rank", 1, "--master", address, "--wait", 1)
    assert alone.returncode == 1
    assert "LaunchError: machine 0 could not be reached within 1 s" in alone.stderr
    assert f"machine 1 of 2, --master {address}" in alone.stderr


@pytest.mark.slow
def test_a_port_in_use_is_an_error_that_names_it(job_file: Path) -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = used.getsockname()[1]
        done = train(job_file, "--machines", 2, "--rank", 0, "--master", f"127.0.0.1:{port}", "--wait", 1)
    assert done.returncode == 1
    assert f"LaunchError: port {port} of this machine is in use" in done.stderr
    assert "choose another port on every machine" in done.stderr


PARENT = """
import os, subprocess, sys, time
variables = {**os.environ, "LATENTLINE_PARENT_PID": str(os.getpid())}
child = subprocess.Popen(sys.argv[1:], env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(child.pid, flush=True)
time.sleep(300)
"""


@pytest.mark.slow
def test_the_command_and_its_processes_end_with_the_process_that_started_it(job_file: Path) -> None:
    options = ["--machines", "2", "--rank", "0", "--master", f"127.0.0.1:{free_port()}"]
    command_line = [sys.executable, "-m", "pipeline.cli", "train", str(job_file), *options]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *command_line], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        started = psutil.Process(int(parent.stdout.readline()))
        until(started.children, seconds=120)
        processes = [started, *started.children(recursive=True)]
    finally:
        parent.kill()
        parent.communicate()
    until(lambda: not any(each.is_running() for each in processes), seconds=60)
