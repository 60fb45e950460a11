"""A small substitute for the API server of Kubernetes; it runs the pods of Indexed Jobs as local processes.

No cluster can run in the test suite. The server accepts only manifests that agree with the models of the
installed package `kubernetes`, which are generated from the OpenAPI description of one Kubernetes version.

Pods with a subdomain start when its service exists. Their DNS names become addresses of this machine, and the
port of each becomes a free one, because all pods share one network.
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
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from kubernetes import client

from tests.free_ports import free_ports
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
                command = server.command_of(self)
                if command is not None:
                    pod.start(command)
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
        services: Services by name.
        deleted: Names of deleted jobs and services.
        pending: Indices of pods that do not start.
        image_is_broken: Whether the command of every pod fails.
        program: Python code that takes the place of `python -m pipeline.cli` in every pod, or None.
        num_failing_requests: Number of following requests that are answered with an error of the server.
        num_lost_answers: Number of following requests that are carried out, but not answered.
        forbidden: Methods of requests that are refused.
        lines_per_connection: Number of lines after which a connection that follows a log is lost.
        requests: Methods and paths of all requests.
        after: Called with the method and the path of a request before it is answered.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.services: dict[str, dict[str, Any]] = {}
        self.deleted: list[str] = []
        self.pending: set[int] = set()
        self.image_is_broken = False
        self.program: str | None = None
        self.num_failing_requests = 0
        self.num_lost_answers = 0
        self.forbidden: set[str] = set()
        self.lines_per_connection: int | None = None
        self.requests: list[str] = []
        self.after: Callable[[str, str], object] = lambda method, path: None
        self._ports: dict[str, int] = {}
        self._lock = threading.Lock()

    def pods(self) -> list[Pod]:
        """Return the pods of all jobs that exist."""
        return [pod for job in self._existing().values() for pod in job.pods]

    def command_of(self, job: Job) -> list[str] | None:
        """Return the command of a job's pods on this machine; None until its service exists."""
        if self.image_is_broken:
            return [sys.executable, "-c", "raise SystemExit('no module pipeline in this image')"]
        python, *arguments = self._container(job)["command"]
        assert (python, arguments[:2]) == ("python", ["-m", "pipeline.cli"]) or self.program is None
        if self.program is not None:
            arguments = ["-c", self.program, *arguments[2:]]
        command = [sys.executable if python == "python" else python, *arguments]
        if (subdomain := job.spec.get("subdomain")) is None:
            return command
        service = self.services.get(subdomain)
        if service is None:
            return None
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["selector"] == {"job-name": job.name}
        first = f"{job.name}-0.{subdomain}:"
        port = self._ports.setdefault(job.name, free_ports(1)[0])
        return [f"127.0.0.1:{port}" if part.startswith(first) else part for part in command]

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return the status and the body of an answer; a generator of lines for a log."""
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
                return self._create(kind, body)
            if kind == "pods":
                return self._log(parts[0], options) if parts else (200, self._pods(options["labelSelector"]))
            return self._delete(kind, parts[0]) if method == "DELETE" else self._job(parts[0])

    def _create(self, kind: str, manifest: dict[str, Any]) -> tuple[int, Any]:
        mistakes = list(manifest_mistakes({"jobs": "V1Job", "services": "V1Service"}[kind], manifest))
        if mistakes:
            return 422, _message("; ".join(mistakes))
        name = manifest["metadata"]["name"]
        if name in (self._existing() if kind == "jobs" else self.services):
            return 409, _message(f'{kind} "{name}" already exists')
        manifest["metadata"]["uid"] = str(uuid.uuid4())
        if kind == "jobs":
            self.jobs[name] = Job(manifest)
            self.jobs[name].reconcile(self)
        else:
            (owner,) = manifest["metadata"]["ownerReferences"]
            assert owner["uid"] == self.jobs[owner["name"]].manifest["metadata"]["uid"]
            self.services[name] = manifest
        return 201, manifest

    def _delete(self, kind: str, name: str) -> tuple[int, Any]:
        if name not in (self._existing() if kind == "jobs" else self.services):
            return 404, _message(f'{kind} "{name}" not found')
        if kind == "jobs":
            self.jobs[name].is_deleted = True
            self.jobs[name].reconcile(self)
        else:
            del self.services[name]
        self.deleted.append(f"{kind}/{name}")
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
        return 200, self._lines(pod, options)

    def _lines(self, pod: Pod, options: dict[str, str]) -> Iterator[str]:
        follows, number = options.get("follow") == "True", 0
        if "tailLines" in options:
            pod_lines = list(pod.log)[-int(options["tailLines"]) :]
            yield from (line for _, line in pod_lines)
            return
        while True:
            is_complete = pod.is_read or not follows
            for stamp, line in pod.log[number:]:
                if follows and number == self.lines_per_connection:
                    raise ConnectionError
                number += 1
                yield f"{stamp} {line}"
            if is_complete:
                return
            time.sleep(0.05)

    def _existing(self) -> dict[str, Job]:
        """Return the jobs that are not deleted, or whose pods have not ended."""
        return {name: job for name, job in self.jobs.items() if not (job.is_deleted and job.has_ended())}

    @staticmethod
    def _container(job: Job) -> dict[str, Any]:
        return next(each for each in job.spec["containers"] if each["name"] == "latentline")


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
            if isinstance(answer, dict):
                data = json.dumps(answer).encode()
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
                return
            self.send_header("Content-Type", "text/plain")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                for line in answer:
                    data = line.encode()
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                    self.wfile.flush()
                self.wfile.write(b"0\r\n\r\n")
            except ConnectionError:
                self.close_connection = True

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
