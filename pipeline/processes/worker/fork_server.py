"""`python -m pipeline.processes.worker.fork_server <module>...`: fork processes of entry modules.

pipeline/processes/fork_server.py starts it, and describes its protocol. It computes nothing and uses no GPU,
so a forked process inherits neither threads nor a CUDA context. It becomes the last process itself.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.processes.guard import end_now, end_with_parent
from pipeline.processes.launch import PARENT_VARIABLE
from pipeline.processes.worker.imports import quick_imports


def main() -> None:
    """Import the libraries of all entry modules, and fork a process for each order but the last."""
    end_with_parent()
    # Libraries may print hints while they are imported.
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # The job imports the same, and reports an error where its user reads it.
    with suppress(Exception), quick_imports():
        for module in sys.argv[1:]:
            importlib.import_module(f"{module}.__main__").import_libraries()

    has_gpu = _has_gpu()
    server = os.getpid()
    while line := sys.stdin.buffer.readline():
        order = json.loads(line)
        if order["is_last"]:
            _become_process(order, answers, has_gpu=has_gpu)
            return
        pid = os.fork()
        if pid == 0:
            # First, because the run waits for the answer, and then looks for processes of this session.
            os.setsid()
            # Not os.getppid(): the server may have been killed since the fork.
            order["variables"][PARENT_VARIABLE] = str(server)
            _become_process(order, answers, has_gpu=has_gpu)
            return
        _, status = os.waitpid(pid, 0)
        unfinished = Path(f"{order['status_file']}.unfinished")
        unfinished.write_text(str(os.waitstatus_to_exitcode(status)), encoding="utf-8")
        unfinished.rename(order["status_file"])
    end_now(0)


def _become_process(order: Mapping[str, Any], answers: int, *, has_gpu: bool) -> None:
    """Take over environment and output of the job in this process, and run its entry module."""
    os.write(answers, f"{os.getpid()}\n".encode())
    os.close(answers)

    os.environ.update(order["variables"])
    output = os.open(order["output"], os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, sys.stdin), (output, sys.stdout), (output, sys.stderr)):
        os.dup2(source, target.fileno())
    os.close(output)
    os.close(nothing)

    module, job_file = order["module"], order["job_file"]
    if has_gpu and not _can_use_gpu():
        os.execv(sys.executable, [sys.executable, "-m", module, job_file])  # noqa: S606 - no shell is wanted
    main_module = find_spec(f"{module}.__main__")
    assert main_module is not None
    assert main_module.origin is not None
    sys.argv = [main_module.origin, job_file]
    runpy.run_path(main_module.origin, run_name="__main__")


def _has_gpu() -> bool:
    try:
        import torch
    except (ImportError, OSError):
        return False  # the job reports it
    return torch.cuda.device_count() > 0


def _can_use_gpu() -> bool:
    """Return whether this process, which may be forked, can initialise CUDA."""
    import torch

    # It cannot if the server has, as torch does to count GPUs without NVML.
    try:
        torch.cuda.init()
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    main()
