"""Manifests of encoding and training: Indexed Jobs, and the service of a training's pods.

Kubernetes sets JOB_COMPLETION_INDEX in each pod, from which `latentline encode` takes its shard, and
`latentline train` the rank of its machine. The pods of a training have the names

    <job>-0.<service>  <job>-1.<service>  ...

through the headless service, which has the name of the job. Machine 0 is the first of them.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from launchers.kubernetes_client import CONTAINER
from pipeline.encoding.shared_encoding import SharedEncoding
from pipeline.errors import LaunchError

MASTER_PORT = 29_500
"""Port of pod 0 where the pods of a training meet; each pod has an address of its own."""

FORGOTTEN_AFTER_S = 24 * 3600
"""Time after which Kubernetes deletes a finished job, if the step could not."""

TERMINATION_MARGIN_S = 30
"""Seconds that a pod has to end after the processes of its training had their time for a checkpoint."""

SEPARATE_VOLUMES = ("configMap", "downwardAPI", "emptyDir", "ephemeral", "projected", "secret")
"""Kinds of volumes through which a pod cannot share a folder with other pods."""


@dataclass(frozen=True)
class TrainingPods:
    """The pods of a training.

    Attributes:
        job_file: Path of the job file.
        number: Number of pods.
        image: Image of the container.
        pod: Keys of a PodSpec, see `encoding_job`.
        wait_s: Longest wait of a pod for the others to start.
        grace_s: Time that the processes of a stopped pod have to write a checkpoint.
    """

    job_file: Path
    number: int
    image: str
    pod: Mapping[str, Any]
    wait_s: int
    grace_s: float

    @property
    def name(self) -> str:
        """Name of the job, equal for all attempts at one run, so that only one can exist at a time."""
        folder = self.job_file.parent
        digest = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
        return _name(f"latentline-{folder.name[:20]}-{digest}")

    @property
    def termination_s(self) -> int:
        """Seconds between the signal that stops a pod and its kill."""
        needed_s = math.ceil(self.grace_s) + TERMINATION_MARGIN_S
        return max(needed_s, int(self.pod.get("terminationGracePeriodSeconds") or 0))

    def job(self) -> dict[str, Any]:
        """Return the manifest of the job."""
        command = ["train", str(self.job_file), "--machines", str(self.number)]
        command += ["--master", f"{self.name}-0.{self.name}:{MASTER_PORT}"]
        command += ["--wait", str(self.wait_s), "--grace", f"{self.grace_s:g}"]
        # A training cannot continue without one of its pods: the first failure ends the job and its pods.
        job = _indexed_job(self.name, self.number, component="training", backoff_limit=0)
        job["spec"]["template"]["spec"] = {
            **_pod(command, image=self.image, pod=self.pod),
            "restartPolicy": "Never",
            "subdomain": self.name,
            "terminationGracePeriodSeconds": self.termination_s,
        }
        return job

    def service(self, job_uid: str) -> dict[str, Any]:
        """Return the manifest of the service; Kubernetes deletes it with the job, if the step cannot."""
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": self.name, "uid": job_uid}
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {
                "name": self.name,
                "labels": _labels("training"),
                "ownerReferences": [owner],
            },
            "spec": {
                "clusterIP": "None",
                "selector": {"job-name": self.name},
                # The pods look for each other as soon as they start.
                "publishNotReadyAddresses": True,
            },
        }


def encoding_job(
    encoding: SharedEncoding, num_shards: int, *, image: str, pod: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the manifest of an Indexed Job that encodes an encoding's shards.

    Args:
        encoding: Encoding of all shards.
        num_shards: Number of pods.
        image: Image of the container.
        pod: Keys of a PodSpec. Its first container is merged into the one that encodes, for resources and for
            `envFrom` with secrets; further ones are added.
    """
    # One more pod per shard on average, for nodes that are lost.
    name = _name(f"latentline-{encoding.encoding_id}")
    job = _indexed_job(name, num_shards, component="encoding", backoff_limit=num_shards)
    job["spec"]["template"]["spec"] = {
        "restartPolicy": "Never",
        **_pod(["encode", str(encoding.address)], image=image, pod=pod),
    }
    return job


def require_shared_folder(pod: Mapping[str, Any], folder: Path, what: str, *, written: bool) -> None:
    """Raise LaunchError if the pods cannot share a folder with the step, judged by their volumes.

    Args:
        pod: Keys of a PodSpec.
        folder: Absolute path that all pods need.
        what: The folder's name in the error, such as "the folder of the run".
        written: Whether a pod writes to the folder.
    """
    containers = pod.get("containers") or [{}]
    mounts = {
        PurePosixPath(mount["mountPath"]): mount
        for mount in containers[0].get("volumeMounts") or ()
        if folder.is_relative_to(mount["mountPath"])
    }
    fix = (
        "mount a volume that the step and all pods share at the same path, with `volumes` and `volumeMounts` "
        "of the first container in launcher.pod; docs/launchers.md has an example"
    )
    if not mounts:
        raise LaunchError(
            f"no volume of launcher.pod contains {what}, which every pod of a training needs",
            where=str(folder),
            fix=fix,
        )

    path, mount = max(mounts.items(), key=lambda item: len(item[0].parts))
    volume = next((each for each in pod.get("volumes") or () if each["name"] == mount["name"]), {})
    kind = next((each for each in SEPARATE_VOLUMES if each in volume), None)
    if kind is not None or (written and mount.get("readOnly")):
        reason = f"is of the kind {kind}, which pods do not share" if kind else "is read-only"
        raise LaunchError(
            f"the volume {mount['name']} of launcher.pod {reason}, but contains {what}",
            where=f"{folder}, mounted at {path}",
            fix=fix,
        )


def _indexed_job(name: str, num_pods: int, *, component: str, backoff_limit: int) -> dict[str, Any]:
    """Return the manifest of a job without the specification of its pods."""
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": _labels(component)},
        "spec": {
            "completionMode": "Indexed",
            "completions": num_pods,
            "parallelism": num_pods,
            "backoffLimit": backoff_limit,
            "ttlSecondsAfterFinished": FORGOTTEN_AFTER_S,
            "template": {},
        },
    }


def _pod(arguments: list[str], *, image: str, pod: Mapping[str, Any]) -> dict[str, Any]:
    own = {"name": CONTAINER, "image": image, "command": ["python", "-m", "pipeline.cli", *arguments]}
    first, *others = [dict(each) for each in pod.get("containers", ())] or [{}]
    return {**pod, "containers": [first | own, *others]}


def _labels(component: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "latentline", "app.kubernetes.io/component": component}


def _name(text: str) -> str:
    """Return a text as the name of an object, of lower-case letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9-]", "-", text.lower())[:63].rstrip("-")
