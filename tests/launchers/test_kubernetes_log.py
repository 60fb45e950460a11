"""The log of a pod at a substitute for the API server that ends connections."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="needs the extra [k8s]")

from launchers.kubernetes_client import KubernetesClient, condition_of
from launchers.kubernetes_log import FollowedLog
from tests.launchers.kubernetes_api import Server, api

__all__ = ["api"]  # fixture


def job_manifest(code: str) -> dict[str, Any]:
    """Return a job of one pod that runs some Python."""
    container = {"name": "latentline", "image": "x", "command": [sys.executable, "-uc", code]}
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "job"},
        "spec": {"completionMode": "Indexed", "completions": 1, "backoffLimit": 0, "template": template},
    }


def test_a_log_is_complete_and_in_order_although_its_connection_is_lost(api: Server) -> None:
    api.lines_per_connection = 7
    kubernetes = KubernetesClient("default")
    kubernetes.create_job(job_manifest("for i in range(20): print('line', i)"))
    (pod,) = kubernetes.pods_of("job")
    log = FollowedLog(kubernetes, pod.metadata.name)
    lines: list[str] = []
    end_s = time.monotonic() + 60
    while condition_of(kubernetes.read_job("job"), "Complete") is None:
        lines += log.new_lines()
        assert time.monotonic() < end_s
        time.sleep(0.05)
    log.finish(10)
    lines += log.new_lines()
    assert lines == [f"line {index}" for index in range(20)]
    assert kubernetes.last_lines(pod, 2) == ["line 18", "line 19"]
