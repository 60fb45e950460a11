"""Requests to a substitute for the API server: outages, and objects that do not exist."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from pipeline.errors import LaunchError

pytest.importorskip("kubernetes", reason="needs the extra [k8s]")

from kubernetes import client

from launchers.kubernetes_client import KubernetesClient
from tests.launchers.kubernetes_api import Server, api

__all__ = ["api"]  # fixture


def job_manifest() -> dict[str, Any]:
    """Return a job of one pod."""
    container = {"name": "latentline", "image": "x", "command": [sys.executable, "-c", "pass"]}
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "job"},
        "spec": {"completionMode": "Indexed", "completions": 1, "backoffLimit": 0, "template": template},
    }


def test_requests_are_repeated_while_the_server_does_not_answer(api: Server) -> None:
    kubernetes = KubernetesClient("default", patience_s=5)
    kubernetes.create_job(job_manifest())
    api.num_failing_requests = 3
    assert kubernetes.read_job("job").metadata.name == "job"
    assert api.num_failing_requests == 0

    api.num_failing_requests = 10**6
    kubernetes = KubernetesClient("default", patience_s=1)
    with pytest.raises(LaunchError, match=r"did not answer for 1 s: .*the server is starting"):
        kubernetes.read_job("job")
    (pod,) = next(iter(api.jobs.values())).pods
    assert kubernetes.last_lines(client.V1Pod(metadata=client.V1ObjectMeta(name=pod.name)), 3) == []


def test_objects_that_do_not_exist_are_none_and_a_name_is_given_once(api: Server) -> None:
    kubernetes = KubernetesClient("default")
    assert kubernetes.read_job("job") is None
    assert kubernetes.pods_of("job") == []
    kubernetes.delete_job("job")
    kubernetes.delete_service("job")
    assert kubernetes.create_job(job_manifest()) is not None
    assert kubernetes.create_job(job_manifest()) is None
