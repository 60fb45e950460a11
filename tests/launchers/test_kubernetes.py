"""Encoding as an Indexed Job, with real workers at a substitute for the API server."""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from dagster import DagsterExecutionInterruptedError

from pipeline.encoding.shared_encoding import SharedEncoding
from pipeline.errors import LaunchError
from tests.launchers.steps import encode, in_step

pytest.importorskip("kubernetes", reason="needs the extra [k8s]")

from launchers import kubernetes
from launchers.kubernetes import KubernetesLauncher, job_manifest
from tests.launchers.kubernetes_api import Server, api, manifest_mistakes, stop_during_creation

__all__ = ["api"]  # fixtures

POD = {
    "nodeSelector": {"accelerator": "h100"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "containers": [
        {
            "resources": {"limits": {"nvidia.com/gpu": "1"}},
            "envFrom": [{"secretRef": {"name": "latentline-credentials"}}],
        }
    ],
}


def manifest_of(pod: dict[str, Any]) -> dict[str, Any]:
    encoding = SharedEncoding(Path("/cache/encodings/20261125-020159-latents-1a2b3c4d"))
    return job_manifest(encoding, 8, image="registry.example.com/latentline:0.3.0", pod=pod)


def test_the_manifest_agrees_with_the_models_of_the_kubernetes_package() -> None:
    job = manifest_of(POD)
    assert list(manifest_mistakes("V1Job", job)) == []
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 8, 8)
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][-2:] == ["encode", "/cache/encodings/20261125-020159-latents-1a2b3c4d"]
    assert container["envFrom"] == [{"secretRef": {"name": "latentline-credentials"}}]
    assert "env" not in container
    assert (container["name"], container["image"]) == ("latentline", "registry.example.com/latentline:0.3.0")
    assert (pod["nodeSelector"], pod["restartPolicy"]) == (POD["nodeSelector"], "Never")


def test_further_containers_of_the_pod_stay() -> None:
    pod = {"containers": [*POD["containers"], {"name": "proxy", "image": "proxy:1"}]}
    containers = manifest_of(pod)["spec"]["template"]["spec"]["containers"]
    assert [each["name"] for each in containers] == ["latentline", "proxy"]


@pytest.mark.clusters
def test_a_manifest_that_the_server_rejects_is_an_error_with_its_message(cache: Any, api: Server) -> None:
    launcher = KubernetesLauncher(image="x", pod={"nodeSelectr": {}})
    _, error = in_step(launcher, lambda launch: encode(cache, launch))
    assert isinstance(error, LaunchError)
    assert "nodeSelectr" in error.what
    assert "launcher.pod" in error.fix
    assert api.jobs == {}


@pytest.mark.clusters
def test_two_pods_write_the_bytes_of_a_local_run_and_the_job_is_deleted(
    cache: Any, api: Server, entry_bytes: Any, in_process_launch: Any
) -> None:
    encode(cache, in_process_launch)
    expected = entry_bytes()
    shutil.rmtree(cache.recipe.cache_dir)
    shutil.rmtree(cache.recipe.output_dir)

    reports: list[Any] = []
    launcher = KubernetesLauncher(image="x", workers=2)
    messages, error = in_step(launcher, lambda launch: reports.append(encode(cache, launch).report))
    assert error is None
    assert [report["encoded"] for report in reports] == [5]
    assert entry_bytes() == expected
    assert "created the Kubernetes job default/latentline-" in "\n".join(messages)
    assert api.deleted == list(api.jobs)


@pytest.mark.clusters
def test_a_job_whose_creation_was_not_answered_is_followed_and_deleted(cache: Any, api: Server) -> None:
    api.image_is_broken, api.num_lost_answers = True, 1
    messages, error = in_step(KubernetesLauncher(image="x"), lambda launch: encode(cache, launch))
    assert "0/1" in str(error)
    (name,) = api.jobs
    assert f"created the Kubernetes job default/{name}" in messages
    assert api.deleted == [name]


@pytest.mark.clusters
def test_R12_a_stop_while_the_job_is_created_deletes_it(cache: Any, api: Server) -> None:
    api.pending, api.after = {0}, stop_during_creation
    _, error = in_step(KubernetesLauncher(image="x"), lambda launch: encode(cache, launch))
    assert isinstance(error, DagsterExecutionInterruptedError)
    assert api.deleted == list(api.jobs)
    assert len(api.jobs) == 1


@pytest.mark.clusters
def test_a_deletion_that_fails_is_a_warning_and_the_error_of_the_encoding_stays(
    cache: Any, api: Server
) -> None:
    api.image_is_broken, api.forbidden = True, {"DELETE"}
    messages, error = in_step(KubernetesLauncher(image="x"), lambda launch: encode(cache, launch))
    assert "0/1" in str(error)
    (name,) = api.jobs
    (warning,) = [message for message in messages if "could not be deleted" in message]
    assert warning.endswith(f"delete it: kubectl --namespace default delete job {name}")


@pytest.mark.clusters
def test_pods_that_do_not_start_are_logged_with_their_reason(cache: Any, api: Server) -> None:
    api.pending = {0}
    listed = threading.Event()

    def start_pods(method: str, path: str) -> None:
        # The first list of pods has the reason; the next one finds that they have started.
        if method == "GET" and "/pods" in path:
            listed.set()
            api.image_is_broken, api.pending = True, set()

    api.after = start_pods
    messages, _ = in_step(KubernetesLauncher(image="x"), lambda launch: encode(cache, launch))
    assert listed.is_set()
    (name,) = api.jobs
    assert any(message.startswith(f"1 pod of {name} waiting: ErrImagePull") for message in messages)


@pytest.mark.clusters
def test_the_log_of_a_failed_pod_is_quoted(cache: Any, api: Server) -> None:
    api.image_is_broken = True
    launcher = KubernetesLauncher(image="x", workers=1)
    _, error = in_step(launcher, lambda launch: encode(cache, launch))
    assert isinstance(error, LaunchError)
    assert "0/1" in error.what
    assert "-0-" in error.where
    assert ": no module pipeline in this image" in error.where
    assert api.deleted == list(api.jobs)


@pytest.mark.clusters
def test_requests_are_repeated_while_the_server_does_not_answer(cache: Any, api: Server) -> None:
    api.image_is_broken = True
    api.after = lambda method, path: method == "POST" and setattr(api, "num_failing_requests", 6)
    _, error = in_step(KubernetesLauncher(image="x"), lambda launch: encode(cache, launch))
    assert "0/1" in str(error)
    assert api.num_failing_requests == 0


@pytest.mark.clusters
def test_a_server_that_is_away_for_too_long_is_an_error(
    cache: Any, api: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "PATIENCE_S", 0.5)
    monkeypatch.setattr(kubernetes, "DELETION_PATIENCE_S", 0.5)
    monkeypatch.setattr(kubernetes, "POLL_S", 0.05)
    api.after = lambda method, path: method == "POST" and setattr(api, "num_failing_requests", 10**6)
    messages, error = in_step(KubernetesLauncher(image="x"), lambda launch: encode(cache, launch))
    assert isinstance(error, LaunchError)
    assert "did not answer for 0.5 s: " in error.what
    assert any("could not be deleted" in message for message in messages)
