"""Manifests agree with Kubernetes' models, and volumes that pods cannot share are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.encoding.shared_encoding import SharedEncoding
from pipeline.errors import LaunchError

pytest.importorskip("kubernetes", reason="needs the extra [k8s]")

from launchers.kubernetes_manifests import TrainingPods, encoding_job, require_shared_folder
from tests.launchers.kubernetes_api import manifest_mistakes

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
    order = SharedEncoding(Path("/cache/orders/20261125-020159-latents-1a2b3c4d"))
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


def training(**changes: Any) -> TrainingPods:
    values: dict[str, Any] = {
        "order": Path("/app/outputs/flowers/runs/0123456789abcdef/order.json"),
        "number": 4,
        "image": "registry.example.com/latentline:0.2.0",
        "pod": POD,
        "wait_s": 900,
        "grace_s": 20.5,
    }
    return TrainingPods(**{**values, **changes})


def test_the_manifests_of_a_training_agree_with_the_models_of_the_kubernetes_package() -> None:
    pods = training()
    job, service = pods.job(), pods.service("a-uid")
    assert list(manifest_mistakes("V1Job", job)) == []
    assert list(manifest_mistakes("V1Service", service)) == []


def test_each_pod_of_a_training_finds_pod_0_through_the_headless_service() -> None:
    pods = training()
    job, service = pods.job(), pods.service("a-uid")
    pod = job["spec"]["template"]["spec"]
    command = pod["containers"][0]["command"]
    options = dict(zip(command[5::2], command[6::2], strict=True))
    assert command[3:5] == ["train", "/app/outputs/flowers/runs/0123456789abcdef/order.json"]
    assert options == {
        "--machines": "4",
        "--master": f"{pods.name}-0.{pods.name}:29500",
        "--wait": "900",
        "--grace": "20.5",
    }
    assert pod["subdomain"] == service["metadata"]["name"] == job["metadata"]["name"] == pods.name
    assert service["spec"]["selector"] == {"job-name": pods.name}
    assert service["spec"]["clusterIP"] == "None"
    assert service["metadata"]["ownerReferences"][0]["uid"] == "a-uid"


def test_one_failed_pod_ends_a_training_and_no_pod_starts_again() -> None:
    job = training(pod={"restartPolicy": "OnFailure"}).job()
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    assert spec["backoffLimit"] == 0
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_a_stopped_pod_has_more_time_than_the_checkpoint_of_its_training() -> None:
    assert training().job()["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 51
    longer = training(pod={"terminationGracePeriodSeconds": 600}).job()
    assert longer["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 600


def test_attempts_at_one_run_share_a_name_and_other_folders_have_another_one() -> None:
    name = training().name
    assert name == training(number=2, image="another").name
    assert name.startswith("latentline-0123456789abcdef-")
    assert training(order=Path("/other/outputs/runs/0123456789abcdef/order.json")).name != name
    # The name of a pod's host must be a label of DNS: at most 63 characters with the index.
    assert len(training(order=Path("/o/runs") / ("x" * 100) / "order.json").name) <= 50


FOLDER = Path("/app/outputs/flowers/runs/0123456789abcdef")


def pod_with(volume: dict[str, Any], **mount: Any) -> dict[str, Any]:
    mounts = [{"name": "outputs", "mountPath": "/app/outputs", **mount}]
    return {"volumes": [{"name": "outputs", **volume}], "containers": [{"volumeMounts": mounts}]}


CLAIM = {"persistentVolumeClaim": {"claimName": "outputs"}}


@pytest.mark.parametrize(
    ("pod", "what"),
    [
        ({}, "no volume of launcher.pod contains the folder"),
        ({"containers": []}, "no volume of launcher.pod contains the folder"),
        (pod_with(CLAIM, mountPath="/app/out"), "no volume of launcher.pod contains the folder"),
        (pod_with({"emptyDir": {}}), "is of the kind emptyDir, which pods do not share"),
        (pod_with(CLAIM, readOnly=True), "is read-only"),
    ],
)
def test_a_training_whose_pods_cannot_share_a_folder_is_refused(pod: dict[str, Any], what: str) -> None:
    with pytest.raises(LaunchError) as caught:
        require_shared_folder(pod, FOLDER, "the folder", written=True)
    assert what in caught.value.what
    assert str(FOLDER) in caught.value.where
    assert "volumeMounts" in caught.value.fix


def test_a_volume_that_pods_share_is_accepted() -> None:
    require_shared_folder(pod_with(CLAIM), FOLDER, "the folder", written=True)
    require_shared_folder(pod_with(CLAIM, mountPath="/"), FOLDER, "the folder", written=True)
    require_shared_folder(pod_with(CLAIM, readOnly=True), FOLDER, "the folder", written=False)


def test_the_innermost_mount_decides() -> None:
    pod = pod_with(CLAIM)
    pod["volumes"].append({"name": "runs", "emptyDir": {}})
    pod["containers"][0]["volumeMounts"].insert(0, {"name": "runs", "mountPath": "/app/outputs/flowers/runs"})
    with pytest.raises(LaunchError, match="the volume runs of launcher"):
        require_shared_folder(pod, FOLDER, "the folder", written=True)
