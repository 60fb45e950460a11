"""Encoding as an Indexed Job: its manifest, and real workers at a substitute for the API server."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from dagster import AssetExecutionContext, DagsterInstance, asset, materialize

from pipeline.encoding.shared_order import SharedOrder
from pipeline.errors import LaunchError
from pipeline.recipe import AccelerateSettings
from pipeline.vae_latents.stage import cache_latents
from resources.launchers.local import AccelerateLauncher
from tests.pipeline.cache_case import cache, entry_bytes

__all__ = ["cache", "entry_bytes"]  # fixtures

pytest.importorskip("kubernetes", reason="needs the extra [k8s]")

from resources.launchers.kubernetes import KubernetesLauncher, encoding_job
from tests.kubernetes_api import Server, kubernetes_api, manifest_mistakes

ROOT = Path(__file__).resolve().parents[3]

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


def job_of(pod: dict[str, Any]) -> dict[str, Any]:
    order = SharedOrder(Path("/cache/orders/20261125-020159-latents-1a2b3c4d"))
    return encoding_job(order, 8, image="registry.example.com/latentline:0.2.0", pod=pod)


def test_the_manifest_agrees_with_the_models_of_the_kubernetes_package() -> None:
    job = job_of(POD)
    assert list(manifest_mistakes("V1Job", job)) == []
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 8, 8)
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][-2:] == ["encode", "/cache/orders/20261125-020159-latents-1a2b3c4d"]
    assert container["envFrom"] == [{"secretRef": {"name": "latentline-credentials"}}]
    assert "env" not in container
    assert (container["name"], container["image"]) == ("latentline", "registry.example.com/latentline:0.2.0")
    assert (pod["nodeSelector"], pod["restartPolicy"]) == (POD["nodeSelector"], "Never")


def test_an_unknown_key_of_the_pod_is_a_mistake_and_further_containers_stay() -> None:
    assert "nodeSelectr" in "".join(manifest_mistakes("V1Job", job_of({"nodeSelectr": {}})))
    pod = {"containers": [*POD["containers"], {"name": "proxy", "image": "proxy:1"}]}
    containers = job_of(pod)["spec"]["template"]["spec"]["containers"]
    assert [each["name"] for each in containers] == ["latentline", "proxy"]


def in_step(launcher: Any, project: Any) -> tuple[Any, list[str]]:
    """Encode in a step; return the report or the error, and the messages in Dagster's log."""
    outcomes: list[Any] = []

    @asset
    def step(context: AssetExecutionContext, launcher: AccelerateLauncher) -> None:
        launch = launcher.bind(context, AccelerateSettings())
        buckets, tables = project.buckets(), project.tables
        try:
            outcomes.append(cache_latents(project.recipe, buckets, tables, launch=launch, log=str).report)
        except Exception as err:
            outcomes.append(err)

    with DagsterInstance.ephemeral() as instance:
        result = materialize([step], resources={"launcher": launcher}, instance=instance)
        messages = [entry.user_message for entry in instance.all_logs(result.run_id)]
    return outcomes[0], messages


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Provide the state of an API server to which the user's kubeconfig leads."""
    with kubernetes_api() as (url, state):
        kubeconfig = {
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "clusters": [{"name": "test", "cluster": {"server": url}}],
            "users": [{"name": "test", "user": {}}],
        }
        file = tmp_path / "kubeconfig"
        file.write_text(json.dumps(kubeconfig), encoding="utf-8")
        # The package reads the variable KUBECONFIG when it is imported.
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        yield state


def test_a_manifest_that_the_server_rejects_is_an_error_with_its_message(cache: Any, api: Server) -> None:
    error, _ = in_step(KubernetesLauncher(image="x", pod={"nodeSelectr": {}}), cache)
    assert isinstance(error, LaunchError)
    assert "nodeSelectr" in error.what
    assert "launcher.pod" in error.fix
    assert api.jobs == {}


@pytest.mark.slow
def test_two_pods_write_the_bytes_of_a_local_run_and_the_job_is_deleted(
    cache: Any, api: Server, entry_bytes: Any, in_process_launch: Any
) -> None:
    cache_latents(cache.recipe, cache.buckets(), cache.tables, launch=in_process_launch, log=str)
    expected = entry_bytes()
    shutil.rmtree(cache.recipe.cache_dir)
    shutil.rmtree(cache.recipe.output_dir)

    report, messages = in_step(KubernetesLauncher(image="x", workers=2), cache)
    assert report["encoded"] == 5
    assert entry_bytes() == expected
    assert any("created the Kubernetes job default/latentline-" in message for message in messages)
    assert api.deleted == list(api.jobs)


def test_the_log_of_a_failed_pod_is_quoted(cache: Any, api: Server) -> None:
    api.image_is_broken = True
    error, _ = in_step(KubernetesLauncher(image="x", workers=1), cache)
    assert isinstance(error, LaunchError)
    assert "0/1" in error.what
    assert "pod-0: no module pipeline in this image" in error.where
    assert api.deleted == list(api.jobs)
