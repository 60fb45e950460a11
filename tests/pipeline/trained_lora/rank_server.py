"""Training processes that start in milliseconds, because they are forked from a server that imported torch.

`python -m tests.pipeline.trained_lora.rank_server` reads one JSON line per request: `start` forks a process
and answers its id, `wait` answers its exit status. The server computes nothing, so its children inherit no
threads.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from pipeline.processes.launch import ERROR_FILE_VARIABLE, PARENT_VARIABLE, launch_environment
from pipeline.processes.machines import Machines
from pipeline.recipe import AccelerateSettings
from pipeline.trained_lora.job import TrainingJob
from tests.pipeline.trained_lora.two_machines import free_port

ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Rank:
    """One training process.

    Attributes:
        pid: Its process id.
        output: File with what it prints.
        error: File with its `LatentlineError`, as JSON; exists after one.
    """

    server: RankServer
    pid: int
    output: Path
    error: Path

    def end(self) -> int:
        """Wait for the end; return the exit status, or minus the number of the signal that ended it."""
        return int(self.server.request({"wait": self.pid}))

    def kill(self) -> None:
        """End the process as a loss of power would."""
        os.kill(self.pid, signal.SIGKILL)

    def text(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")


class RankServer:
    """A context manager for the server."""

    def __init__(self, folder: Path) -> None:
        """Start the server; the output of its children goes to `folder`."""
        self._folder = folder
        self._num_started = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.pipeline.trained_lora.rank_server"],
            cwd=ROOT,
            env=launch_environment(AccelerateSettings(), folder / "unused.json"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == "ready"

    def start(self, order: Path, rank: int, port: int, *, machines: int) -> Rank:
        """Start one of two processes, on one machine or on two, as accelerate's launcher does."""
        self._num_started += 1
        output = self._folder / f"output-{self._num_started}.txt"
        error = self._folder / f"error-{self._num_started}.json"
        variables = {
            "RANK": rank,
            "WORLD_SIZE": 2,
            "LOCAL_RANK": rank if machines == 1 else 0,
            "LOCAL_WORLD_SIZE": 2 // machines,
            "GROUP_RANK": rank if machines == 2 else 0,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "ACCELERATE_USE_CPU": "true",
            ERROR_FILE_VARIABLE: error,
        }
        if machines == 2:
            variables |= Machines(2, rank, "127.0.0.1", port).environment()
        request = {
            "order": str(order),
            "output": str(output),
            "variables": {k: str(v) for k, v in variables.items()},
        }
        return Rank(self, int(self.request({"start": request})), output, error)

    def train(self, job: TrainingJob) -> None:
        """Train a job in two processes of one machine, which must succeed."""
        order, port = job.write(), free_port()
        ranks = [self.start(order, rank, port, machines=1) for rank in (0, 1)]
        assert [rank.end() for rank in ranks] == [0, 0], "\n".join(rank.text() for rank in ranks)

    def request(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> RankServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()


def _serve() -> None:
    import pipeline.processes.worker.machine_watch
    import pipeline.trained_lora.worker.loop  # noqa: F401 - imported once, for all children
    from pipeline.trained_lora.worker.__main__ import main

    print("ready", flush=True)  # noqa: T201 - the protocol
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            answer = _fork(request["start"], main)
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        print(json.dumps(answer), flush=True)  # noqa: T201 - the protocol


def _fork(request: dict[str, Any], main: Callable[[Path], None]) -> int:
    pid = os.fork()
    if pid:
        return pid

    status = 1
    try:
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(request["variables"], **{PARENT_VARIABLE: str(os.getppid())})
        main(Path(request["order"]))
        status = 0
    except SystemExit as err:
        status = int(err.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
