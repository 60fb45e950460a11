"""A small substitute for the API server of Kubernetes; it runs the pods of Indexed Jobs as local processes.

No cluster can run in the test suite. The server accepts only manifests that agree with the models of the
installed package `kubernetes`, which are generated from the OpenAPI description of one Kubernetes version.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from kubernetes import client

from tests.launchers.kubernetes_pods import Pod

ROOT = Path(__file__).resolve().parents[2]

_PRIMITIVES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (int, float),
}


def manifest_mistakes(model: str, value: Any, path: str = "") -> Iterator[str]:
    """Yield every unknown key, missing required key and wrong type of a manifest."""
    if model in _PRIMITIVES:
        if not isinstance(value, _PRIMITIVES[model]):
            yield f"{path}: {value!r} is not of type {model}"
    elif match := re.fullmatch(r"list\[(.+)\]", model):
        for index, item in enumerate(value):
            yield from manifest_mistakes(match[1], item, f"{path}[{index}]")
    elif match := re.fullmatch(r"dict\(str, (.+)\)", model):
        for name, item in value.items():
            yield from manifest_mistakes(match[1], item, f"{path}.{name}")
    elif hasattr(client, model):
        yield from _object_mistakes(getattr(client, model), value, path)


def _object_mistakes(model: Any, value: dict[str, Any], path: str) -> Iterator[str]:
    types = {model.attribute_map[name]: kind for name, kind in model.openapi_types.items()}
    for name, item in value.items():
        if name not in types:
            yield f"{path}: unknown field {name}"
        else:
            yield from manifest_mistakes(types[name], item, f"{path}.{name}")
    python_names = {json_name: name for name, json_name in model.attribute_map.items()}
    given = {python_names[name]: item for name, item in value.items() if name in python_names}
    try:
        model(**given)  # the constructor checks required fields
    except ValueError as err:
        yield f"{path}: {err}"


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Return a word of a container's command as Kubernetes starts it: $(NAME) is a variable, and $$ is $."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)",
        lambda match: "$" if match[0] == "$$" else variables.get(match[1], match[0]),
        text,
    )


class Job:
    """An Indexed Job, whose controller replaces failed pods up to `backoffLimit`."""

    def __init__(self, manifest: dict[str, Any]) -> None:
        self.manifest, self.is_deleted, self.has_failed = manifest, False, False
        self.name: str = manifest["metadata"]["name"]
        self.spec: dict[str, Any] = manifest["spec"]["template"]["spec"]
        self.pods = [Pod(self.name, index, self.spec) for index in range(manifest["spec"]["completions"])]
        self.num_failures = 0

    def reconcile(self, server: Server) -> None:
        """Start pods, replace failed ones, and stop all others after too many failures."""
        for pod in self.current():
            if pod.status() and not self.has_failed and not self.is_deleted:
                self.num_failures += 1
                self.has_failed = self.num_failures > self.manifest["spec"]["backoffLimit"]
                if not self.has_failed:
                    self.pods.append(Pod(self.name, pod.index, self.spec))
        for pod in self.current():
            if self.has_failed or self.is_deleted:
                pod.terminate()
            elif pod.process is None and pod.index not in server.pending:
                pod.start(server.command_of(self))
        # The controller deletes the pods that it stops.
        self.pods = [pod for pod in self.pods if not (pod.is_stopped and pod.has_ended())]

    def current(self) -> list[Pod]:
        """Return the newest pod of each index."""
        return list({pod.index: pod for pod in self.pods}.values())

    def has_ended(self) -> bool:
        return all(pod.has_ended() for pod in self.current())

    def status(self) -> dict[str, Any]:
        if not self.has_ended():
            return {"active": sum(not pod.has_ended() for pod in self.pods)}
        kind, reason = ("Failed", "BackoffLimitExceeded") if self.has_failed else ("Complete", "Completed")
        return {"conditions": [{"type": kind, "status": "True", "reason": reason, "message": "a message"}]}


class Server:
    """State of the API server.

    Attributes:
        jobs: All jobs by name, deleted ones included.
        deleted: Names of deleted jobs.
        pending: Indices of pods that do not start.
        image_is_broken: Whether the command of every pod fails.
        num_failing_requests: Number of following requests that are answered with an error of the server.
        num_lost_answers: Number of following requests that are carried out, but not answered.
        forbidden: Methods of requests that are refused.
        requests: Methods and paths of all requests.
        after: Called with the method and the path of a request before it is answered.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.deleted: list[str] = []
        self.pending: set[int] = set()
        self.image_is_broken = False
        self.num_failing_requests = 0
        self.num_lost_answers = 0
        self.forbidden: set[str] = set()
        self.requests: list[str] = []
        self.after: Callable[[str, str], object] = lambda method, path: None
        self._lock = threading.Lock()

    def pods(self) -> list[Pod]:
        """Return the pods of all jobs that exist."""
        return [pod for job in self._existing().values() for pod in job.pods]

    def command_of(self, job: Job) -> list[str]:
        """Return the command of a job's pods on this machine."""
        if self.image_is_broken:
            return [sys.executable, "-c", "raise SystemExit('no module pipeline in this image')"]
        container = next(each for each in job.spec["containers"] if each["name"] == "latentline")
        python, *arguments = container["command"]
        assert python == "python"
        return [sys.executable, *(expanded(each, os.environ) for each in arguments)]

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return the status and the body of an answer; a text for a log."""
        with self._lock:
            self.requests.append(f"{method} {path}")
            if self.num_failing_requests > 0:
                self.num_failing_requests -= 1
                return 503, _message("the server is starting")
            if method in self.forbidden:
                return 403, _message(f"{method} is forbidden")
            for job in self.jobs.values():
                job.reconcile(self)
            kind, *parts = urlsplit(path).path.strip("/").split("/namespaces/default/")[1].split("/")
            options = {name: values[0] for name, values in parse_qs(urlsplit(path).query).items()}
            if method == "POST":
                assert options == {"fieldValidation": "Strict"}
                return self._create(body)
            if kind == "pods":
                return self._log(parts[0], options) if parts else (200, self._pods(options["labelSelector"]))
            if method == "DELETE":
                assert options["propagationPolicy"] == "Foreground"
                return self._delete(parts[0])
            return self._job(parts[0])

    def _create(self, manifest: dict[str, Any]) -> tuple[int, Any]:
        mistakes = list(manifest_mistakes("V1Job", manifest))
        if mistakes:
            return 422, _message("; ".join(mistakes))
        name = manifest["metadata"]["name"]
        if name in self._existing():
            return 409, _message(f'jobs "{name}" already exists')
        manifest["metadata"]["uid"] = str(uuid.uuid4())
        self.jobs[name] = Job(manifest)
        self.jobs[name].reconcile(self)
        return 201, manifest

    def _delete(self, name: str) -> tuple[int, Any]:
        if name not in self._existing():
            return 404, _message(f'jobs "{name}" not found')
        self.jobs[name].is_deleted = True
        self.jobs[name].reconcile(self)
        self.deleted.append(name)
        return 200, {"kind": "Status", "status": "Success"}

    def _job(self, name: str) -> tuple[int, Any]:
        job = self._existing().get(name)
        if job is None:
            return 404, _message(f'jobs "{name}" not found')
        return 200, job.manifest | {"status": job.status()}

    def _pods(self, selector: str) -> dict[str, Any]:
        job = self._existing().get(selector.removeprefix("job-name="))
        reason = "ErrImagePull"
        return {"items": [pod.as_json(reason) for pod in job.pods] if job is not None else []}

    def _log(self, name: str, options: dict[str, str]) -> tuple[int, Any]:
        pod = next((pod for job in self._existing().values() for pod in job.pods if pod.name == name), None)
        if pod is None:
            return 404, _message(f'pods "{name}" not found')
        assert options["container"] == "latentline"
        return 200, "".join(line for _, line in pod.log[-int(options["tailLines"]) :])

    def _existing(self) -> dict[str, Job]:
        """Return the jobs that are not deleted, or whose pods have not ended."""
        return {name: job for name, job in self.jobs.items() if not (job.is_deleted and job.has_ended())}


def stop_during_creation(method: str, path: str) -> None:
    """Send this process SIGINT while it waits for the answer to the creation of a job; see `Server.after`."""
    if method == "POST" and "/jobs" in path:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)


def _message(text: str) -> dict[str, Any]:
    return {"kind": "Status", "message": text}


@contextmanager
def kubernetes_api() -> Generator[tuple[str, Server]]:
    """Run the server during the body, and provide its URL and state."""
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            status, answer = state.answer(self.command, self.path, body)
            state.after(self.command, self.path)
            if state.num_lost_answers > 0:
                state.num_lost_answers -= 1
                self.close_connection = True
                return
            self.send_response(status)
            is_log = isinstance(answer, str)
            data = (answer if is_log else json.dumps(answer)).encode()
            self.send_header("Content-Type", "text/plain" if is_log else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = _handle  # noqa: N815 - names of the base class

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", state
    finally:
        for job in state.jobs.values():
            for pod in job.pods:
                pod.kill()
        server.shutdown()
        server.server_close()


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
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
