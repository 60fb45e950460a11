"""`python -m tools.ui`: TensorBoard and Dagster's UI answer on 127.0.0.1 and end together."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from dagster import DagsterInstance
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from pipeline.processes.tree import ProcessTree
from pipeline.reporting import tensorboard
from tests.e2e.daemon import make_home
from tests.free_ports import free_port
from tests.waiting import until
from tools.ui import END_WAIT_S, end, link_runs, start_tensorboard, tensorboard_problem

ROOT = Path(__file__).resolve().parents[2]


def get(url: str) -> bytes | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.read()
    except OSError:
        return None


def write_recipe(folder: Path, name: str) -> Path:
    """Write a recipe, and return its output folder."""
    values = {
        "datasets": [{"name": "photos", "path": str(folder / "data")}],
        "cache_dir": str(folder / "cache"),
        "output_dir": str(folder / f"out-{name}"),
        "model": {"base": "models/none"},
    }
    (folder / "data").mkdir(exist_ok=True)
    (folder / "configs").mkdir(exist_ok=True)
    (folder / "configs" / f"{name}.yaml").write_text(json.dumps(values), encoding="utf-8")
    return folder / f"out-{name}"


def write_events(output_dir: Path) -> None:
    """Write the loss of one step as a run's TensorBoard tracker does."""
    writer = EventFileWriter(str(output_dir / "runs" / "0123456789abcdef" / "logs"))
    loss = Summary(value=[Summary.Value(tag="loss", simple_value=0.5)])
    writer.add_event(Event(wall_time=time.time(), step=1, summary=loss))
    writer.close()


@pytest.fixture
def flowers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the recipe `flowers`, which has one run, and of a broken recipe."""
    monkeypatch.setenv("LATENTLINE_CONFIGS", str(tmp_path / "configs"))
    write_events(write_recipe(tmp_path, "flowers"))
    (tmp_path / "configs" / "broken.yaml").write_text("datasets: 3\n", encoding="utf-8")
    return tmp_path


def test_the_links_follow_the_recipes(flowers: Path) -> None:
    links = flowers / "links"
    link_runs(links)
    assert [link.name for link in links.iterdir()] == ["flowers"]
    assert (links / "flowers").resolve() == (flowers / "out-flowers" / "runs").resolve()

    write_recipe(flowers, "cats")
    (flowers / "configs" / "flowers.yaml").unlink()
    link_runs(links)
    assert list(links.iterdir()) == [], "the recipe cats has no runs yet"
    (flowers / "out-cats" / "runs").mkdir(parents=True)
    link_runs(links)
    assert [link.name for link in links.iterdir()] == ["cats"]


def test_tensorboard_serves_the_runs_behind_the_links(flowers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tensorboard.PORT_VARIABLE, str(free_port()))
    link_runs(flowers / "links")
    process = start_tensorboard(flowers / "links", flowers / "links.log")
    try:
        runs = ["flowers/0123456789abcdef/logs"]
        until(lambda: json.loads(get(f"{tensorboard.url()}data/runs") or b"[]") == runs)
        (listening,) = {
            connection.laddr.ip
            for connection in psutil.Process(process.pid).net_connections("inet")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == tensorboard.port()
        }
        assert listening == "127.0.0.1"
    finally:
        process.terminate()
        process.wait(30)


def test_a_busy_port_is_reported_with_its_fix(flowers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        number = listener.getsockname()[1]
        monkeypatch.setenv(tensorboard.PORT_VARIABLE, str(number))
        link_runs(flowers / "links")
        assert start_tensorboard(flowers / "links", flowers / "links.log").wait(120) != 0
    problem = tensorboard_problem(flowers / "links.log")
    assert str(number) in problem.splitlines()[0]
    assert "fix:" in problem


def test_the_link_of_a_run_filters_tensorboard_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tensorboard.PORT_VARIABLE, raising=False)
    assert tensorboard.url("flowers/0123") == "http://127.0.0.1:6006/?runFilter=flowers%2F0123"


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["Ctrl-C", "SIGTERM", "L9 SIGTERM in the background of a script"])
def test_both_interfaces_answer_and_end_together(flowers: Path, stop: str) -> None:
    home = flowers / "home"
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n", encoding="utf-8")
    ports = free_port(), free_port()
    options = ["--port", str(ports[0]), "--tensorboard-port", str(ports[1])]
    options += ["--page-port", "0"]
    # `&` in a script makes the command ignore SIGINT.
    ignore = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"] if "background" in stop else []
    process = subprocess.Popen(
        [*ignore, sys.executable, "-m", "tools.ui", *options],
        env={**os.environ, "DAGSTER_HOME": str(home)},
        cwd=ROOT,
        start_new_session=True,
    )
    tree = ProcessTree(process.pid)
    try:
        until(lambda: get(f"http://127.0.0.1:{ports[0]}/server_info"), seconds=300)
        until(lambda: get(f"http://127.0.0.1:{ports[1]}/data/environment"), seconds=300)
        members = tree.members()
        if stop == "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.terminate()
        start_s = time.monotonic()
        process.wait(120)
        if "background" in stop:
            assert time.monotonic() - start_s < END_WAIT_S, "Dagster received the signal"
        until(lambda: not any(member.is_running() for member in members), seconds=60)
    finally:
        tree.stop(grace_s=0)


def test_no_descendant_of_a_process_that_does_not_end_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.ui.END_WAIT_S", 0.2)
    monkeypatch.setattr("tools.ui.STOP_WAIT_S", 0.2)
    file = tmp_path / "child"
    code = "import pathlib, signal, subprocess, sys, time\n"
    code += "for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)\n"
    code += "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    code += "pathlib.Path(sys.argv[1]).write_text(str(child.pid))\ntime.sleep(600)\n"
    process = subprocess.Popen([sys.executable, "-c", code, str(file)])
    until(lambda: file.exists() and file.read_text())

    end(process)
    assert process.returncode is not None
    assert not is_alive(int(file.read_text()))


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_project_instance_opens_the_ui_without_the_subscription_dialog(tmp_path: Path) -> None:
    with DagsterInstance.from_config(str(make_home(tmp_path / "home"))) as instance:
        assert not instance.nux_enabled
