"""The manifest of a training in pods agrees with Kubernetes' models, and its pods find each other."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from pipeline.processes.cluster_variables import MachineOptions, find_machines

pytest.importorskip("kubernetes", reason="needs the extra [k8s]")

from tests.launchers.kubernetes_api import manifest_mistakes

FILE = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes-training.yaml"


@pytest.fixture
def manifests() -> dict[str, dict[str, Any]]:
    documents = YAML(typ="safe").load_all(io.StringIO(FILE.read_text(encoding="utf-8")))
    return {each["kind"]: each for each in documents}


def test_the_manifests_agree_with_the_models_of_the_kubernetes_package(manifests: Any) -> None:
    assert list(manifest_mistakes("V1Job", manifests["Job"])) == []
    assert list(manifest_mistakes("V1Service", manifests["Service"])) == []


def test_each_pod_finds_pod_0_through_the_headless_service(manifests: Any) -> None:
    job, service = manifests["Job"], manifests["Service"]
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert service["spec"]["clusterIP"] == "None"

    (container,) = pod["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    num_pods = job["spec"]["completions"]
    for index in range(num_pods):
        environment = {**variables, "JOB_COMPLETION_INDEX": str(index)}
        machines = find_machines(MachineOptions(wait_s=60), environment)
        host = f"{job['metadata']['name']}-0.{pod['subdomain']}"
        assert (machines.number, machines.rank, machines.host) == (num_pods, index, host)


def test_one_failed_pod_ends_the_training_and_no_pod_starts_again(manifests: Any) -> None:
    spec = manifests["Job"]["spec"]
    assert (spec["completionMode"], spec["completions"]) == ("Indexed", spec["parallelism"])
    assert spec["backoffLimit"] == 0
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
