"""Pods of the substitute for Kubernetes: each is a local process with a log."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import psutil


class Pod:
    """One pod of a job, a process with its log.

    Attributes:
        index: Index in its job.
        name: Name with a random end, as Kubernetes gives it.
        process: The process; None while the pod is pending.
        log: Times and lines.
        is_read: Whether the log is complete.
        is_stopped: Whether the controller of the job has stopped the pod.
    """

    def __init__(self, job: str, index: int, spec: dict[str, Any]) -> None:
        self.index, self.spec = index, spec
        self.name = f"{job}-{index}-{uuid.uuid4().hex[:5]}"
        self.process: subprocess.Popen[str] | None = None
        self.log: list[tuple[str, str]] = []
        self.is_read = self.is_stopped = False
        self._kill_s = float("inf")
        self._ended: str | None = None

    def start(self, command: list[str]) -> None:
        self.process = subprocess.Popen(
            command,
            env=os.environ | {"JOB_COMPLETION_INDEX": str(self.index), "NO_COLOR": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def status(self) -> int | None:
        """Return the exit status, 128 plus the signal's number for a killed pod; None before the end."""
        if self.process is None:
            return None
        if time.monotonic() > self._kill_s:
            self.kill()
        status = self.process.poll()
        if status is not None and self._ended is None:
            self._ended = _now()
        return None if status is None else status if status >= 0 else 128 - status

    def has_ended(self) -> bool:
        return self.status() is not None or (self.is_stopped and self.process is None)

    def terminate(self) -> None:
        """Send the signal that stops a pod, and kill it after its grace period."""
        if not self.is_stopped and not self.has_ended():
            self.is_stopped = True
            self._kill_s = time.monotonic() + self.spec.get("terminationGracePeriodSeconds", 30)
            if self.process is not None:
                self.process.terminate()

    def kill(self) -> None:
        """Kill all processes at once, as if the node lost its power."""
        if self.process is None or self.process.poll() is not None:
            return
        root = psutil.Process(self.process.pid)
        processes = [root, *root.children(recursive=True)]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # none of them may react to the death of another
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
        self.process.wait(60)

    def as_json(self, reason_to_wait: str) -> dict[str, Any]:
        status = self.status()
        phase = "Running" if status is None else "Failed" if status else "Succeeded"
        state: dict[str, Any] = {"running": {}}
        if self.process is None:
            phase, state = "Pending", {"waiting": {"reason": reason_to_wait}}
        elif status is not None:
            state = {"terminated": {"exitCode": status, "finishedAt": self._ended, "reason": "Error"}}
        container = {"name": "latentline", "image": "x", "imageID": "x", "ready": True, "restartCount": 0}
        return {
            "metadata": {
                "name": self.name,
                "annotations": {"batch.kubernetes.io/job-completion-index": str(self.index)},
            },
            "spec": {**self.spec, "nodeName": f"node-{self.index}"},
            "status": {"phase": phase, "containerStatuses": [{**container, "state": state}]},
        }

    def _read(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                self.log.append((_now(), line))
        self.is_read = True


def _now() -> str:
    """Return the time as Kubernetes writes it, with nanoseconds whose last zeros are missing."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f").rstrip("0") + "Z"
