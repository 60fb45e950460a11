"""Encoding as an Indexed Job of Kubernetes, with one pod per shard. Training runs in the pod of the step.

Kubernetes sets JOB_COMPLETION_INDEX in each pod, from which `latentline encode` takes its shard.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from pydantic import Field

from pipeline.encoding.shared_order import SharedOrder
from pipeline.errors import LaunchError
from pipeline.processes.launch import OUTPUT_TAIL_LINES
from resources.launchers.output import uninterrupted
from resources.launchers.remote import Encoding, RemoteLauncher

POLL_S = 2.0

CONTAINER = "latentline"
"""Name of the container that encodes."""

FORGOTTEN_AFTER_S = 24 * 3600
"""Time after which Kubernetes deletes a finished job, if the step could not."""

_MAX_NAMED_PODS = 5


class KubernetesLauncher(RemoteLauncher):
    """Starts encoding as an Indexed Job."""

    namespace: str = Field(default="default", description="Namespace in which the pods are created.")
    image: str = Field(description="Image with this version of Latentline.")
    pod: dict[str, Any] = Field(
        default_factory=dict, description="Keys merged into the specification of each pod."
    )

    def encode(self, encoding: Encoding) -> Sequence[str]:
        """See `RemoteLauncher.encode`. An interruption of the wait deletes the job and its pods.

        Raises:
            LaunchError: The cluster cannot be reached, or rejects the job.
        """
        job = encoding_job(encoding.order, encoding.num_shards, image=self.image, pod=self.pod)
        name = cast("str", job["metadata"]["name"])
        try:
            jobs: Any = client.BatchV1Api(_api_client())
            jobs.create_namespaced_job(self.namespace, job, field_validation="Strict")
            encoding.context.log.info(f"created the Kubernetes job {self.namespace}/{name}")
        except (ApiException, OSError) as err:
            raise self._rejection(name, err) from err

        try:
            while not _has_ended(jobs.read_namespaced_job_status(name, self.namespace)):
                time.sleep(POLL_S)
            return self._last_output(name)
        except ApiException as err:
            raise self._rejection(name, err) from err
        finally:
            with uninterrupted():
                jobs.delete_namespaced_job(name, self.namespace, propagation_policy="Foreground")

    def _last_output(self, job: str) -> list[str]:
        """Return the last lines of the failed pods."""
        pods: Any = client.CoreV1Api(_api_client())
        lines: list[str] = []
        failed = pods.list_namespaced_pod(
            self.namespace, label_selector=f"job-name={job}", field_selector="status.phase=Failed"
        )
        for pod in failed.items[:_MAX_NAMED_PODS]:
            # The client's own text of a log is that of a bytes object: "b'...'".
            response = pods.read_namespaced_pod_log(
                pod.metadata.name, self.namespace, tail_lines=4, _preload_content=False
            )
            text = response.data.decode("utf-8", errors="replace")
            lines += [f"{pod.metadata.name}: {line}" for line in text.splitlines()]
        return lines[-OUTPUT_TAIL_LINES:]

    def _rejection(self, name: str, err: Exception) -> LaunchError:
        text = str(err.body or err.reason) if isinstance(err, ApiException) else str(err)
        return LaunchError(
            f"Kubernetes did not run the job {name}: {' '.join(text.split())[:500]}",
            where=f"namespace {self.namespace}",
            fix="correct launcher.pod, launcher.image or launcher.namespace in the deployment file; if "
            "access was denied, allow the service account of the step to create, read and delete jobs and "
            "to read pods and their logs",
        )


def encoding_job(
    order: SharedOrder, num_shards: int, *, image: str, pod: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the manifest of an Indexed Job that encodes an order.

    Args:
        order: Order of all shards.
        num_shards: Number of pods.
        image: Image of the container.
        pod: Keys of a PodSpec. Its first container is merged into the one that encodes, for resources and for
            `envFrom` with secrets; further ones are added.
    """
    own: dict[str, Any] = {
        "name": CONTAINER,
        "image": image,
        "command": ["python", "-m", "pipeline.cli", "encode", str(order.address)],
    }
    first, *others = [dict(each) for each in pod.get("containers", ())] or [{}]

    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": re.sub(r"[^a-z0-9-]", "-", f"latentline-{order.order_id}".lower())[:63].rstrip("-"),
            "labels": {"app.kubernetes.io/name": "latentline", "app.kubernetes.io/component": "encoding"},
        },
        "spec": {
            "completionMode": "Indexed",
            "completions": num_shards,
            "parallelism": num_shards,
            # One more pod per shard on average, for nodes that are lost.
            "backoffLimit": num_shards,
            "ttlSecondsAfterFinished": FORGOTTEN_AFTER_S,
            "template": {
                "spec": {
                    "restartPolicy": "Never",
                    **pod,
                    "containers": [first | own, *others],
                }
            },
        },
    }


def _has_ended(job: Any) -> bool:
    conditions = job.status.conditions or []
    return any(each.type in ("Complete", "Failed") and each.status == "True" for each in conditions)


def _api_client() -> Any:
    """Return a client with the service account of this pod, or with the user's kubeconfig.

    Raises:
        LaunchError: There is neither.
    """
    try:
        config.load_incluster_config()
    except config.ConfigException:
        try:
            config.load_kube_config()
        except config.ConfigException as err:
            raise LaunchError(
                f"the Kubernetes cluster cannot be accessed: {err}",
                where="launcher: kubernetes",
                fix="run the step in a pod, or set KUBECONFIG to a file with access to the cluster",
            ) from err
    return client.ApiClient()
