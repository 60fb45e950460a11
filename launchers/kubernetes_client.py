"""Requests to the API server of Kubernetes about jobs, services and pods of one namespace."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from pipeline.errors import LaunchError

POLL_S = 2.0

PATIENCE_S = 300.0
"""Default of the longest time without an answer of the API server, whose upgrade takes minutes."""

DELETION_PATIENCE_S = 20.0
"""The same for a deletion, for which a stopped step has little time."""

CONTAINER = "latentline"
"""Name of the container that encodes or trains."""

ATTEMPT_ANNOTATION = "latentline/attempt"
"""Annotation with a random text, by which a created job is recognised if the server's answer was lost."""

INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
"""Annotation with the index of a pod in its Indexed Job."""

_NOT_FOUND, _CONFLICT, _TOO_MANY_REQUESTS, _SERVER_ERROR = 404, 409, 429, 500

_TIMEOUT_S = (10.0, 20.0)
"""Longest wait for a connection, and for an answer."""

_LOG_TIMEOUT_S = (10.0, 120.0)
"""Longest wait for a connection, and for a line of a log before the log is requested again."""

Result = TypeVar("Result")


class KubernetesClient:
    """Jobs, services and pods of a namespace.

    Every method raises LaunchError if the server rejects its request. Requests about existing objects are
    repeated while the server does not answer.
    """

    def __init__(self, namespace: str, *, patience_s: float = PATIENCE_S) -> None:
        """Use the service account of this pod, or the user's kubeconfig.

        Args:
            namespace: Namespace of all objects.
            patience_s: Longest time without an answer of the server.

        Raises:
            LaunchError: There is neither a service account nor a kubeconfig.
        """
        self.namespace, self._patience_s = namespace, patience_s
        api = _api_client()
        self._jobs: Any = client.BatchV1Api(api)
        self._core: Any = client.CoreV1Api(api)

    def create_job(self, manifest: Mapping[str, Any]) -> Any:
        """Create a job and return it; None if one of the same name exists."""
        metadata, attempt = manifest["metadata"], uuid.uuid4().hex
        name = metadata["name"]
        annotations = {**metadata.get("annotations", {}), ATTEMPT_ANNOTATION: attempt}
        marked = {**manifest, "metadata": {**metadata, "annotations": annotations}}
        try:
            return self._jobs.create_namespaced_job(
                self.namespace, marked, field_validation="Strict", _request_timeout=_TIMEOUT_S
            )
        except ApiException as err:
            if err.status == _CONFLICT:
                return None
            raise self._rejection(name, err) from err
        except (HTTPError, OSError) as err:
            # The server may have created the job before the connection was lost.
            job = self.read_job(name, patience_s=DELETION_PATIENCE_S)
            if job is not None and (job.metadata.annotations or {}).get(ATTEMPT_ANNOTATION) == attempt:
                return job
            raise self._rejection(name, err) from err

    def create_service(self, manifest: Mapping[str, Any]) -> None:
        """Create a service."""
        try:
            self._core.create_namespaced_service(
                self.namespace, manifest, field_validation="Strict", _request_timeout=_TIMEOUT_S
            )
        except (ApiException, HTTPError, OSError) as err:
            raise self._rejection(manifest["metadata"]["name"], err) from err

    def read_job(self, name: str, *, patience_s: float | None = None) -> Any:
        """Return a job with its status; None if it does not exist."""
        return self._request(
            name,
            lambda timeout: self._jobs.read_namespaced_job(name, self.namespace, _request_timeout=timeout),
            patience_s=patience_s,
        )

    def delete_job(self, name: str) -> None:
        """Start to delete a job and its pods. The job exists until its last pod has ended."""
        self._request(
            name,
            lambda timeout: self._jobs.delete_namespaced_job(
                name, self.namespace, propagation_policy="Foreground", _request_timeout=timeout
            ),
            patience_s=DELETION_PATIENCE_S,
        )

    def delete_service(self, name: str) -> None:
        """Delete a service."""
        self._request(
            name,
            lambda timeout: self._core.delete_namespaced_service(
                name, self.namespace, _request_timeout=timeout
            ),
            patience_s=DELETION_PATIENCE_S,
        )

    def pods_of(self, job: str) -> list[Any]:
        """Return the pods of a job, by index."""
        pods = self._request(
            job,
            lambda timeout: self._core.list_namespaced_pod(
                self.namespace, label_selector=f"job-name={job}", _request_timeout=timeout
            ),
        )
        return sorted(pods.items if pods is not None else (), key=pod_index)

    def last_lines(self, pod: Any, number: int) -> list[str]:
        """Return the last lines of a pod's log; none if it cannot be read, for example from a lost node."""
        try:
            # The client's own text of a log is that of a bytes object: "b'...'".
            response = self._log(pod.metadata.name, tail_lines=number, _request_timeout=_TIMEOUT_S)
        except (ApiException, HTTPError, OSError):
            return []
        return response.data.decode("utf-8", errors="replace").splitlines()

    def log_lines(self, pod: str, *, follow: bool, since_s: int | None) -> Iterator[tuple[str, str]]:
        """Yield the lines of a pod's log with their times; with `follow`, until the pod ends.

        Raises:
            ApiException, HTTPError, OSError: The log cannot be read, or the connection was lost.
        """
        options: dict[str, Any] = {} if since_s is None else {"since_seconds": since_s}
        response = self._log(pod, follow=follow, timestamps=True, _request_timeout=_LOG_TIMEOUT_S, **options)
        try:
            for line in response:
                stamp, _, text = line.decode("utf-8", errors="replace").rstrip("\r\n").partition(" ")
                yield _sortable(stamp), text
        finally:
            response.close()

    def _log(self, pod: str, **options: Any) -> Any:
        return self._core.read_namespaced_pod_log(
            pod, self.namespace, container=CONTAINER, _preload_content=False, **options
        )

    def _request(
        self, name: str, send: Callable[[tuple[float, float]], Result], *, patience_s: float | None = None
    ) -> Result | None:
        """Return the answer to a request about an existing object; None if the object does not exist."""
        patience_s = self._patience_s if patience_s is None else patience_s
        end_s = time.monotonic() + patience_s

        while True:
            try:
                return send(_TIMEOUT_S)
            except ApiException as err:
                status = int(err.status or 0)
                if status == _NOT_FOUND:
                    return None
                if status < _SERVER_ERROR and status != _TOO_MANY_REQUESTS:
                    raise self._rejection(name, err) from err
                outage: Exception = err
            except (HTTPError, OSError) as err:
                outage = err

            if time.monotonic() > end_s:
                raise LaunchError(
                    f"the API server of Kubernetes did not answer for {patience_s:g} s: {_text(outage)}",
                    where=f"namespace {self.namespace}, job {name}",
                    fix="restore the access to the API server and start the job again; finished work is kept",
                ) from outage
            time.sleep(POLL_S)

    def _rejection(self, name: str, err: Exception) -> LaunchError:
        return LaunchError(
            f"Kubernetes did not run the job {name}: {_text(err)}",
            where=f"namespace {self.namespace}",
            fix="correct launcher.pod, launcher.image or launcher.namespace in the deployment file; if "
            "access was denied, allow the service account of the step to create, read and delete jobs and "
            "services, and to read pods and their logs",
        )


def not_deleted(namespace: str, job: str, err: LaunchError) -> str:
    """Return a warning about a job that could not be deleted."""
    return (
        f"the Kubernetes job {job} could not be deleted ({err.what}); delete it: "
        f"kubectl --namespace {namespace} delete job {job}"
    )


def pod_index(pod: Any) -> int:
    """Return the index of a pod in its job."""
    return int((pod.metadata.annotations or {}).get(INDEX_ANNOTATION, 0))


def condition_of(job: Any, *kinds: str) -> Any:
    """Return the first true condition of a job among `kinds`, such as "Complete" and "Failed", or None."""
    conditions = job.status.conditions or []
    return next((each for each in conditions if each.type in kinds and each.status == "True"), None)


def _text(err: Exception) -> str:
    """Return the message of the server, or that of the client without one, in one line."""
    text = str(err.body or err.reason) if isinstance(err, ApiException) else str(err)
    return " ".join(text.split())[:500]


def _sortable(stamp: str) -> str:
    """Return a time such as "2026-11-25T02:01:59.12Z" with nine decimals, so that texts can be compared."""
    match = re.match(r"([^.Z+]*)(?:\.(\d*))?", stamp)
    assert match is not None, "the pattern matches an empty text"
    return f"{match[1]}.{(match[2] or '').ljust(9, '0')}"


def _api_client() -> Any:
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
    return cast("Any", client.ApiClient())
