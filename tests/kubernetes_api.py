"""A small substitute for the API server of Kubernetes; it runs the pods of Indexed Jobs as local processes.

No cluster can run in the test suite. The server accepts only manifests that agree with the models of the
installed package `kubernetes`, which are generated from the OpenAPI description of one Kubernetes version.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kubernetes import client

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


class _Job:
    """A job and its pods, one process per index."""

    def __init__(self, manifest: dict[str, Any], *, is_broken: bool) -> None:
        self.manifest = manifest
        spec = manifest["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        command = [sys.executable if part == "python" else part for part in container["command"]]
        if is_broken:
            command = [sys.executable, "-c", "raise SystemExit('no module pipeline in this image')"]
        self.pods = [
            subprocess.Popen(
                command,
                env=os.environ | {"JOB_COMPLETION_INDEX": str(index)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for index in range(spec["completions"])
        ]
        self.logs = [""] * len(self.pods)
        for index, pod in enumerate(self.pods):
            threading.Thread(target=self._read, args=(index, pod), daemon=True).start()

    def _read(self, index: int, pod: subprocess.Popen[str]) -> None:
        assert pod.stdout is not None
        with pod.stdout:
            for line in pod.stdout:
                self.logs[index] += line

    def status(self) -> dict[str, Any]:
        statuses = [pod.poll() for pod in self.pods]
        if None in statuses:
            return {"active": statuses.count(None)}
        kind = "Failed" if any(statuses) else "Complete"
        return {"conditions": [{"type": kind, "status": "True"}]}

    def stop(self) -> None:
        for pod in self.pods:
            pod.terminate()
            pod.wait()


class Server:
    """State of the API server.

    Attributes:
        jobs: Jobs by name.
        deleted: Names of deleted jobs.
        image_is_broken: Whether the command of every pod fails.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, _Job] = {}
        self.deleted: list[str] = []
        self.image_is_broken = False

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        parts = path.partition("?")[0].strip("/").split("/")
        if method == "POST":
            assert path.endswith("fieldValidation=Strict")
            mistakes = list(manifest_mistakes("V1Job", body))
            if mistakes:
                return 422, {"kind": "Status", "message": "; ".join(mistakes)}
            self.jobs[body["metadata"]["name"]] = _Job(body, is_broken=self.image_is_broken)
            return 201, body
        if method == "DELETE":
            self.jobs[parts[-1]].stop()
            self.deleted.append(parts[-1])
            return 200, {"kind": "Status", "status": "Success"}
        if parts[-1] == "status":
            job = self.jobs[parts[-2]]
            return 200, job.manifest | {"status": job.status()}
        (job,) = self.jobs.values()
        if parts[-1] == "log":
            return 200, job.logs[int(parts[-2].rpartition("-")[2])]
        failed = [index for index, pod in enumerate(job.pods) if pod.poll()]
        return 200, {"items": [{"metadata": {"name": f"pod-{index}"}} for index in failed]}


@contextmanager
def kubernetes_api() -> Generator[tuple[str, Server]]:
    """Run the server during the body, and provide its URL and state."""
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            status, answer = state.answer(self.command, self.path, body)
            data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if isinstance(answer, str) else "application/json")
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
            job.stop()
        server.shutdown()
        server.server_close()
