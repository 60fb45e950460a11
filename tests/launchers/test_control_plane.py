"""Encoding with the API server and the job controller of a real Kubernetes, and pods as local processes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from dagster import DagsterExecutionInterruptedError
from ruamel.yaml import YAML

from pipeline.errors import LaunchError
from tests.launchers.steps import encode, in_step

pytest.importorskip("kubernetes", reason="needs the extra [k8s]")

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from launchers.kubernetes import KubernetesLauncher
from tests.launchers.control_plane import (
    INDEX,
    LIMITED_TOKEN,
    LIMITED_USER,
    NAMESPACE,
    TOKEN,
    ControlPlane,
    control_plane,
    why_no_control_plane,
)

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.skipif(why_no_control_plane() is not None, reason=str(why_no_control_plane())),
    pytest.mark.filterwarnings("ignore:Unverified HTTPS request"),
]


@pytest.fixture(scope="module")
def running_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with control_plane(tmp_path_factory.mktemp("kubernetes") / "cluster") as plane:
        yield plane


@pytest.fixture
def plane(running_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> ControlPlane:
    # The package reads the variable KUBECONFIG when it is imported.
    name = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
    monkeypatch.setattr(name, str(running_plane.kubeconfig))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # A test replaces the commands of pods for itself.
    monkeypatch.setattr(running_plane.node, "command_of", running_plane.node.command_of)
    return running_plane


def wait_until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.1)


def nothing_left(plane: ControlPlane) -> bool:
    return plane.jobs() == [] and plane.pods() == []


def test_two_pods_write_the_bytes_of_a_local_run_and_nothing_is_left(
    cache: Any, plane: ControlPlane, entry_bytes: Any, in_process_launch: Any
) -> None:
    encode(cache, in_process_launch)
    expected = entry_bytes()
    shutil.rmtree(cache.recipe.cache_dir)
    shutil.rmtree(cache.recipe.output_dir)

    reports: list[Any] = []
    launcher = KubernetesLauncher(image="x", workers=2)
    messages, error = in_step(launcher, lambda launch: reports.append(encode(cache, launch).report))
    assert error is None, messages
    assert [report["encoded"] for report in reports] == [5]
    assert entry_bytes() == expected
    wait_until(lambda: nothing_left(plane))


def test_an_unknown_key_of_the_pod_is_an_error_with_the_servers_message(
    cache: Any, plane: ControlPlane
) -> None:
    launcher = KubernetesLauncher(image="x", pod={"nodeSelectr": {}})
    _, error = in_step(launcher, lambda launch: encode(cache, launch))
    assert isinstance(error, LaunchError)
    assert 'unknown field \\"spec.template.spec.nodeSelectr\\"' in error.what
    assert plane.jobs() == []


def test_failed_pods_are_replaced_and_their_log_is_quoted(cache: Any, plane: ControlPlane) -> None:
    plane.node.command_of = lambda command: [sys.executable, "-c", "raise SystemExit('no module pipeline')"]
    num_earlier_pods = len(plane.node.pods)
    _, error = in_step(KubernetesLauncher(image="x"), lambda launch: encode(cache, launch))
    assert isinstance(error, LaunchError)
    assert "0/1" in error.what
    assert ": no module pipeline" in error.where
    assert len(plane.node.pods) - num_earlier_pods == 2, "one more pod per shard"
    wait_until(lambda: nothing_left(plane))


def test_R12_a_stopped_step_leaves_no_job_no_pod_and_no_process(cache: Any, plane: ControlPlane) -> None:
    plane.node.command_of = lambda command: [sys.executable, "-c", "import time; time.sleep(600)"]

    def interrupt() -> None:
        wait_until(lambda: [pod for pod in plane.pods() if pod.status.phase == "Running"])
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    _, error = in_step(KubernetesLauncher(image="x"), lambda launch: encode(cache, launch))
    assert isinstance(error, DagsterExecutionInterruptedError)
    wait_until(lambda: nothing_left(plane))
    assert all(pod.has_ended() for pod in plane.node.pods.values())


def test_the_permissions_in_the_documentation_suffice_for_a_job_with_a_failing_pod(
    cache: Any, plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "launchers.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^(apiVersion: rbac.*?)^```", page, re.DOTALL | re.MULTILINE)
    role = YAML(typ="safe").load(text)
    role["metadata"]["namespace"] = NAMESPACE
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role["metadata"]["name"]}
    user = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": LIMITED_USER}
    rbac = client.RbacAuthorizationV1Api(plane.core.api_client)
    rbac.create_namespaced_role(NAMESPACE, role, field_validation="Strict")
    binding = {"metadata": {"name": "latentline"}, "roleRef": reference, "subjects": [user]}
    rbac.create_namespaced_role_binding(NAMESPACE, binding, field_validation="Strict")

    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(plane.kubeconfig.read_text().replace(TOKEN, LIMITED_TOKEN))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
    core = client.CoreV1Api(config.new_client_from_config(str(kubeconfig)))
    with pytest.raises(ApiException, match="Forbidden"):
        core.list_namespaced_service(NAMESPACE)

    def is_in_effect() -> bool:
        with suppress(ApiException):
            return core.list_namespaced_pod(NAMESPACE).items == []
        return False

    wait_until(is_in_effect)
    plane.node.command_of = lambda command: [sys.executable, "-c", "raise SystemExit('no module pipeline')"]
    messages, error = in_step(KubernetesLauncher(image="x"), lambda launch: encode(cache, launch))
    assert isinstance(error, LaunchError)
    assert ": no module pipeline" in error.where
    assert [message for message in messages if "could not be deleted" in message] == []
    wait_until(lambda: nothing_left(plane))


def test_the_manifest_of_a_training_starts_two_pods_with_the_names_and_ranks_of_machines(
    plane: ControlPlane,
) -> None:
    plane.node.command_of = lambda command: [sys.executable, "-c", "import time; time.sleep(600)"]
    text = (ROOT / "deploy" / "kubernetes-training.yaml").read_text(encoding="utf-8")
    service, job = YAML(typ="safe").load_all(text)
    plane.core.create_namespaced_service(NAMESPACE, service, field_validation="Strict")
    plane.batch.create_namespaced_job(NAMESPACE, job, field_validation="Strict")
    wait_until(lambda: [pod.status.phase for pod in plane.pods()] == ["Running", "Running"])

    pods = {pod.metadata.annotations[INDEX]: pod.spec for pod in plane.pods()}
    names = {f"{spec.hostname}.{spec.subdomain}" for spec in pods.values()}
    assert names == {f"latentline-training-{index}.latentline-training" for index in pods}
    for spec in pods.values():
        variables = {each.name: each for each in spec.containers[0].env}
        assert variables["MASTER_ADDR"].value == "latentline-training-0.latentline-training"
        assert INDEX in variables["JOB_COMPLETION_INDEX"].value_from.field_ref.field_path

    plane.batch.delete_namespaced_job(job["metadata"]["name"], NAMESPACE, propagation_policy="Foreground")
    plane.core.delete_namespaced_service(service["metadata"]["name"], NAMESPACE)
    wait_until(lambda: nothing_left(plane))
