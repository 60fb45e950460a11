"""Requests to a substitute for the API server: outages, and logs whose connection is lost."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest

from pipeline.errors import LaunchError

pytest.importorskip("kubernetes", reason="needs the extra [k8s]")

from resources.launchers.kubernetes_client import FollowedLog, KubernetesClient, condition_of
from tests.kubernetes_api import Server, api

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


def test_requests_are_repeated_while_the_server_does_not_answer(api: Server) -> None:
    kubernetes = KubernetesClient("default", patience_s=5)
    kubernetes.create_job(job_manifest("pass"))
    api.num_failing_requests = 3
    assert kubernetes.read_job("job").metadata.name == "job"
    assert api.num_failing_requests == 0

    api.num_failing_requests = 10**6
    with pytest.raises(LaunchError, match="the server is starting"):
        kubernetes.read_job("job")


def test_objects_that_do_not_exist_are_none_and_a_name_is_given_once(api: Server) -> None:
    kubernetes = KubernetesClient("default")
    assert kubernetes.read_job("job") is None
    assert kubernetes.pods_of("job") == []
    kubernetes.delete_job("job")
    kubernetes.delete_service("job")
    assert kubernetes.create_job(job_manifest("pass")) is not None
    assert kubernetes.create_job(job_manifest("pass")) is None


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
