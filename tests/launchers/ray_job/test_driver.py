"""The driver without a cluster; tests/launchers/test_ray.py runs it on one."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from launchers.ray_job.driver import Output, free_address, no_room, run_with_error
from launchers.ray_job.work import RayWork
from pipeline.errors import LaunchError, StoreError
from pipeline.processes.launch import error_from_json

RAISE = """
import os, pathlib
from pipeline.errors import StoreError
from pipeline.processes.launch import error_to_json
error = StoreError("an entry is missing", where="cache/ab", fix="run the cache job")
pathlib.Path(os.environ["LATENTLINE_ERROR_FILE"]).write_text(error_to_json(error))
raise SystemExit(1)
"""

PRINT = """
from pipeline.errors import StoreError
error = StoreError("an entry is missing", where="cache/ab", fix="run the cache job")
print(f"{type(error).__name__}: {error}")
raise SystemExit(1)
"""

UNTIL_SIGTERM = """
import os, signal, sys, time
def stop(*_):
    print("the checkpoint is written", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
print("ready", os.environ["LATENTLINE_PARENT_PID"], flush=True)
time.sleep(300)
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_command_that_succeeds_has_no_error_and_each_line_is_shown() -> None:
    lines: list[str] = []
    ended = run_with_error(python("print('first'); print('last', end='')"), 1.0, lines.append)
    assert (ended.status, ended.error, ended.last_output) == (0, None, ())
    assert lines == ["first", "last"]


@pytest.mark.parametrize("code", [RAISE, PRINT], ids=["written to the error file", "printed"])
def test_the_error_of_a_command_is_returned_with_its_three_parts(code: str) -> None:
    ended = run_with_error(python(code), 1.0, lambda _: None)
    assert ended.status == 1
    assert ended.error is not None
    error = error_from_json(ended.error)
    assert isinstance(error, StoreError)
    assert (error.what, error.where, error.fix) == ("an entry is missing", "cache/ab", "run the cache job")


def test_a_command_that_dies_is_an_error_that_quotes_its_output() -> None:
    code = "import os; print('out of memory', flush=True); os.kill(os.getpid(), 9)"
    ended = run_with_error(python(code), 1.0, lambda _: None)
    assert (ended.status, ended.last_output) == (-9, ["out of memory"])
    assert ended.error is not None
    error = error_from_json(ended.error)
    assert isinstance(error, LaunchError)
    assert "by signal SIGKILL: out of memory" in error.what


def test_a_cancelled_task_stops_its_command_which_may_write_a_checkpoint() -> None:
    lines: list[str] = []

    def show(line: str) -> None:
        lines.append(line)
        if line.startswith("ready"):
            os.kill(os.getpid(), signal.SIGINT)

    ended = run_with_error(python(UNTIL_SIGTERM), 20.0, show)
    assert ended.status == 143
    assert lines == [f"ready {os.getpid()}", "the checkpoint is written"]


def test_each_line_of_output_is_taken_once_and_in_order() -> None:
    output = Output()
    output.put("a")
    output.put("b")
    assert (output.take(), output.take()) == (["a", "b"], [])


def test_a_cluster_that_is_too_small_is_an_error_with_what_its_living_nodes_have() -> None:
    work = RayWork("train", "job", 2, {"CPU": 4, "GPU": 4}, wait_s=60, grace_s=1.0)
    nodes = [
        {"Alive": True, "Resources": {"CPU": 16.0, "GPU": 4.0}},
        {"Alive": True, "Resources": {"CPU": 2.0}},
        {"Alive": False, "Resources": {"CPU": 64.0}},
    ]
    error = no_room(work, nodes)
    assert "must have 2 nodes with CPU 4, GPU 4 each" in error.what
    assert error.what.endswith("after 60 s its nodes have: CPU 16, GPU 4; CPU 2, GPU 0")
    assert "launcher.num_gpus" in error.where
    assert no_room(work, []).what.endswith("its nodes have: nothing")


def test_the_meeting_point_is_an_address_of_this_node_with_a_free_port() -> None:
    pytest.importorskip("ray", reason="needs the extra [ray]")
    host, _, port = free_address().rpartition(":")
    assert host
    assert 0 < int(port) < 2**16
