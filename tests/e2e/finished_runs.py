"""The end of a run: its processes, and the weights that it leaves."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from safetensors.numpy import load_file


def processes_of(workspace: Any) -> list[psutil.Process]:
    """Return the live processes that inherited the workspace's LATENTLINE_CONFIGS."""
    processes: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            belongs = process.environ().get("LATENTLINE_CONFIGS") == str(workspace.file.parent)
            if belongs and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def wait_for_the_end(workspace: Any, within_s: float, *, server: int = 0) -> None:
    """Wait until only the code server is left of a run's processes, at most `within_s` seconds."""
    end_s = time.monotonic() + within_s
    while remaining := [process for process in processes_of(workspace) if not belongs_to(server, process)]:
        assert time.monotonic() < end_s, [process.cmdline() for process in remaining]
        time.sleep(0.1)


def belongs_to(server: int, process: psutil.Process) -> bool:
    """Return whether a process is the server or its multiprocessing resource tracker."""
    with suppress(psutil.NoSuchProcess):
        tracker = "multiprocessing.resource_tracker" in " ".join(process.cmdline())
        return process.pid == server or (tracker and process.ppid() == server)
    return True


def weights(workspace: Any) -> dict[str, dict[str, bytes]]:
    """Return the bytes of each tensor in each LoRA file."""
    return lora_weights(workspace.out)


def lora_weights(output_dir: Path) -> dict[str, dict[str, bytes]]:
    """Return the bytes of each tensor in each LoRA file; the order of a header's metadata varies."""
    files = sorted((output_dir / "lora").glob("*.safetensors"))
    assert len(files) == 3
    return {path.name: {key: value.tobytes() for key, value in load_file(path).items()} for path in files}
