"""Encoding as an Indexed Job of Kubernetes with one pod for each shard.

Requests use the client of dagster-k8s; its PipesK8sClient runs a single pod. A training runs where the
executor runs its step.

`.ci/clusters` tests it with dagster-k8s 0.29.27, kubernetes 36.0.3 and a substitute for the API server
(tests/launchers/kubernetes_api.py). If LATENTLINE_KUBERNETES is set, tests/launchers/control_plane.py starts
the real API server and job controller; its tests passed with Kubernetes 1.36.2. In both, pods are local
processes. Not tested: scheduler, kubelet, images, volumes, GPUs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from dagster import AssetExecutionContext
from dagster_k8s.client import (
    DagsterK8sAPIRetryLimitExceeded,
    DagsterK8sUnrecoverableAPIError,
    DagsterKubernetesClient,
    k8s_api_retry_creation_mutation,
)
from kubernetes import config
from kubernetes.client.exceptions import ApiException
from pydantic import Field
from urllib3.exceptions import HTTPError

from launchers.remote import RemoteLauncher
from pipeline.encoding.shared_encoding import SharedEncoding
from pipeline.errors import LaunchError, counted
from pipeline.processes.launch import OUTPUT_TAIL_LINES
from resources.process_output import uninterrupted
from resources.step_log import StepLog, step_log

if TYPE_CHECKING:
    from pipeline.recipe import AccelerateSettings

CONTAINER = "latentline"
"""Name of the container that encodes."""

FORGOTTEN_AFTER_S = 24 * 3600
"""Time after which Kubernetes deletes a finished job, if the step could not."""

POLL_S = 2.0

# An upgrade of the API server takes minutes.
PATIENCE_S = 300.0
"""Longest time without an answer of the API server."""

# A stopped step has little time.
DELETION_PATIENCE_S = 20.0
"""The same for a deletion."""

# Few, because a stopped step waits for them.
_NUM_RETRIES = 3
"""Number of retries of a creation."""

_TIMEOUT_S = (10.0, 20.0)
"""Longest wait for a connection, and for an answer."""

_MAX_NAMED_PODS = 5
_NOT_FOUND, _CONFLICT, _SERVER_ERROR = 404, 409, 500

Result = TypeVar("Result")


class KubernetesLauncher(RemoteLauncher):
    """Starts encoding as an Indexed Job."""

    namespace: str = Field(default="default", description="Namespace in which the pods are created.")
    image: str = Field(description="Image with this version of Latentline.")
    pod: dict[str, Any] = Field(
        default_factory=dict, description="Keys merged into the specification of each pod."
    )

    def encode(
        self,
        context: AssetExecutionContext,
        settings: AccelerateSettings,
        encoding: SharedEncoding,
        num_shards: int,
    ) -> Sequence[str]:
        """See `RemoteLauncher.encode`."""
        manifest = job_manifest(encoding, num_shards, image=self.image, pod=self.pod)
        job = _Job(_client(), self.namespace, manifest, step_log(context))
        try:
            job.create()
            job.wait()
            return job.last_output()
        finally:
            # Also after Dagster's stop, SIGINT and SIGTERM. A failure is only a warning, because it must not
            # hide the error or the result of the encoding.
            with uninterrupted():
                job.delete_or_warn()


def job_manifest(
    encoding: SharedEncoding, num_shards: int, *, image: str, pod: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the manifest of an Indexed Job, in which each pod reads its shard from JOB_COMPLETION_INDEX.

    `pod` has keys of a PodSpec. Its first container is merged into the container that encodes, for resources
    and for `envFrom` with secrets; further containers are added.
    """
    command = ["python", "-m", "pipeline.cli", "encode", _literal(str(encoding.address))]
    first, *others = [dict(each) for each in pod.get("containers", ())] or [{}]
    container = {**first, "name": CONTAINER, "image": image, "command": command}
    labels = {"app.kubernetes.io/name": "latentline", "app.kubernetes.io/component": "encoding"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": _name(f"latentline-{encoding.encoding_id}"), "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": num_shards,
            "parallelism": num_shards,
            # One more pod per shard on average, for nodes that are lost.
            "backoffLimit": num_shards,
            "ttlSecondsAfterFinished": FORGOTTEN_AFTER_S,
            "template": {
                "spec": {"restartPolicy": "Never", **pod, "containers": [container, *others]},
            },
        },
    }


@dataclass
class _Job:
    client: DagsterKubernetesClient
    namespace: str
    manifest: dict[str, Any]
    log: StepLog
    _may_exist: bool = False

    @property
    def name(self) -> str:
        return self.manifest["metadata"]["name"]

    def create(self) -> None:
        """Create the job, although answers of the server may be lost."""
        num_attempts = 0

        def send() -> None:
            nonlocal num_attempts
            num_attempts += 1
            try:
                # Strict: an unknown key of launcher.pod is an error instead of being ignored.
                self.client.batch_api.create_namespaced_job(
                    self.namespace, self.manifest, field_validation="Strict", _request_timeout=_TIMEOUT_S
                )
            except ApiException as err:
                # An earlier attempt has created the job, and its answer was lost. Dagster's retry accepts
                # a conflict only after an error of the server.
                if err.status != _CONFLICT or num_attempts == 1:
                    raise

        # A signal waits for the server's answer: the job of an interrupted request could start later.
        with uninterrupted():
            self._may_exist = True
            try:
                k8s_api_retry_creation_mutation(send, max_retries=_NUM_RETRIES, timeout=POLL_S)
            except DagsterK8sUnrecoverableAPIError as err:
                self._may_exist = False
                raise self._rejection(err) from err
            except DagsterK8sAPIRetryLimitExceeded as err:
                raise self._rejection(err) from err
        self.log.info(f"created the Kubernetes job {self.namespace}/{self.name}")

    def wait(self) -> None:
        """Wait until the job has completed, failed, or been deleted by somebody."""
        shown = ""
        while not _has_ended(self._patiently(self._status)):
            waiting = self._waiting_pods()
            if waiting != shown:
                self.log.info(waiting or "all pods have started")
                shown = waiting
            time.sleep(POLL_S)

    def last_output(self) -> list[str]:
        """Return the last lines of failed pods, as far as their logs can be read."""
        failed = [pod.metadata.name for pod in self._pods() if pod.status.phase == "Failed"]
        lines: list[str] = []
        for name in failed[:_MAX_NAMED_PODS]:
            try:
                log = self.client.retrieve_pod_logs(name, self.namespace, CONTAINER, tail_lines=4)
            except (ApiException, HTTPError, OSError, UnicodeDecodeError):
                # The pod may have been on a node that is lost.
                continue
            lines += [f"{name}: {line}" for line in log.splitlines()]
        return lines[-OUTPUT_TAIL_LINES:]

    def delete_or_warn(self) -> None:
        """Delete the job with its pods, or log a warning with the command for it."""
        if not self._may_exist:
            return
        try:
            self._patiently(self._delete, DELETION_PATIENCE_S)
        except LaunchError as err:
            self.log.warning(
                f"the Kubernetes job {self.name} could not be deleted ({err.what}); delete it: "
                f"kubectl --namespace {self.namespace} delete job {self.name}"
            )

    def _delete(self) -> None:
        try:
            # Foreground: the job exists until its last pod has ended. Dagster's own delete_job would miss
            # pods that Kubernetes creates meanwhile.
            self.client.batch_api.delete_namespaced_job(
                self.name, self.namespace, propagation_policy="Foreground", _request_timeout=_TIMEOUT_S
            )
        except ApiException as err:
            if err.status != _NOT_FOUND:
                raise

    def _status(self) -> Any:
        """Return the status of the job; None if it does not exist."""
        return self.client.get_job_status(self.name, self.namespace, wait_time_between_attempts=POLL_S)

    def _pods(self) -> list[Any]:
        return self._patiently(lambda: self.client.get_pods_in_job(self.name, self.namespace))

    def _waiting_pods(self) -> str:
        """Return how many pods have not started and the reason of the first one, or nothing."""
        reasons = [reason for pod in self._pods() if (reason := reason_to_wait(pod)) is not None]
        return f"{counted(len(reasons), 'pod')} of {self.name} waiting: {reasons[0]}" if reasons else ""

    def _patiently(self, request: Callable[[], Result], patience_s: float | None = None) -> Result:
        """Return the answer to a request, which is repeated while the API server is away."""
        patience_s = PATIENCE_S if patience_s is None else patience_s
        end_s = time.monotonic() + patience_s
        while True:
            try:
                return request()
            except DagsterK8sUnrecoverableAPIError as err:
                raise self._rejection(err) from err
            except (ApiException, DagsterK8sAPIRetryLimitExceeded, HTTPError, OSError) as err:
                if isinstance(err, ApiException) and int(err.status or 0) < _SERVER_ERROR:
                    raise self._rejection(err) from err
                if time.monotonic() > end_s:
                    raise LaunchError(
                        f"the API server of Kubernetes did not answer for {patience_s:g} s: {_text(err)}",
                        where=f"namespace {self.namespace}, job {self.name}",
                        fix="restore the access to the API server and start the job again; finished work is "
                        "kept",
                    ) from err
            time.sleep(POLL_S)

    def _rejection(self, err: Exception) -> LaunchError:
        return LaunchError(
            f"Kubernetes did not run the job {self.name}: {_text(err)}",
            where=f"namespace {self.namespace}",
            fix="correct launcher.pod, launcher.image or launcher.namespace in the deployment file; if "
            "access was denied, give the service account of the step the role in docs/launchers.md",
        )


def _has_ended(status: Any) -> bool:
    conditions = [] if status is None else status.conditions or []
    return status is None or any(
        each.type in ("Complete", "Failed") and each.status == "True" for each in conditions
    )


def reason_to_wait(pod: Any) -> str | None:
    """Return why a pod has not started, or None if it has."""
    if pod.status.phase != "Pending":
        return None
    for status in pod.status.container_statuses or ():
        if status.state is not None and (waiting := status.state.waiting) is not None:
            return ": ".join(part for part in (waiting.reason, waiting.message) if part)
    for condition in pod.status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            return ": ".join(part for part in (condition.reason, condition.message) if part)
    return "the pod is pending"


def _client() -> DagsterKubernetesClient:
    """Return a client with the service account of this pod, or the user's kubeconfig."""
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
    return DagsterKubernetesClient.production_client()


def _text(err: Exception) -> str:
    """Return the message of the server, or of the client without one, in one line."""
    cause = getattr(err, "k8s_api_exception", err)
    text = str(cause.body or cause.reason) if isinstance(cause, ApiException) else str(cause)
    return " ".join(text.split())[:500]


def _literal(text: str) -> str:
    # Kubernetes replaces $(NAME) in a command by a variable of the container, so that a path in a recipe
    # could show the secrets of `envFrom`, and $$ by $.
    return text.replace("$", "$$")


def _name(text: str) -> str:
    # Names of objects have lower-case letters, digits and hyphens. A job's name is also the value of a label,
    # which has at most 63 characters.
    return re.sub(r"[^a-z0-9-]", "-", text.lower())[:63].rstrip("-")
