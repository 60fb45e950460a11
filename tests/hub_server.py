"""A local server that speaks the Hub's protocol for reading repositories: commits, listings and files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants


@dataclass
class HubRepository:
    """The repository `anna/flowers` on a server, which is a dataset and a model.

    Attributes:
        commits: Files of each commit by its hash, oldest first.
        requested: Revisions of which files were read.
        read: Paths of files that were read, once for each request.
        num_failures: Number of next requests that are answered with status 503.
    """

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict[str, dict[str, bytes]])
    requested: set[str] = field(default_factory=set[str])
    read: list[str] = field(default_factory=list[str])
    num_failures: int = 0

    def push(self, files: dict[str, bytes]) -> str:
        """Add a commit with these files, and return its hash."""
        content = repr((len(self.commits), sorted(files))).encode()
        commit = hashlib.sha1(content, usedforsecurity=False).hexdigest()
        self.commits[commit] = dict(files)
        return commit

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Return hash and files of a commit, or of the branch `main`."""
        commit = list(self.commits)[-1] if revision == "main" else revision
        return (commit, self.commits[commit]) if commit in self.commits else None


def _entries(files: dict[str, bytes], folder: str) -> list[dict[str, Any]]:
    prefix = f"{folder}/" if folder else ""
    entries: dict[str, dict[str, Any]] = {}
    for path, content in files.items():
        if path.startswith(prefix):
            name, _, rest = path[len(prefix) :].partition("/")
            oid = hashlib.sha1(content, usedforsecurity=False).hexdigest()
            kind = {"type": "directory", "size": 0} if rest else {"type": "file", "size": len(content)}
            entries[name] = {**kind, "oid": oid, "path": prefix + name}
    return list(entries.values())


class _Handler(BaseHTTPRequestHandler):
    repository: HubRepository

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        # Addresses of files of a model begin with its owner, all others with the kind of the repository.
        parts = path.removeprefix("/api").strip("/").split("/")
        parts = parts[1:] if parts[0] in ("datasets", "models") else parts
        if self.repository.num_failures:
            self.repository.num_failures -= 1
            self._json(503, {"error": "overloaded"})
        elif parts[:2] != ["anna", "flowers"]:
            self._json(404, {"error": "Repository not found"}, "RepoNotFound")
        else:
            self._answer(parts[2] if len(parts) > 2 else "revision", parts[3:])

    def _answer(self, kind: str, parts: list[str]) -> None:
        revision, path = (parts[0] if parts else "main"), "/".join(parts[1:])
        found = self.repository.at(revision)
        if found is None:
            self._json(404, {"error": "Revision not found"}, "RevisionNotFound")
            return
        commit, files = found
        if kind == "revision":
            self._json(200, {"id": "anna/flowers", "sha": commit, "siblings": []})
        elif kind == "tree":
            entries = _entries(files, path)
            self._json(200 if entries else 404, entries, None if entries else "EntryNotFound")
        elif path in files:
            self.repository.requested.add(revision)
            self.repository.read.append(path)
            self._file(files[path], commit)
        else:
            self._json(404, {"error": "Entry not found"}, "EntryNotFound")

    def _file(self, content: bytes, commit: str) -> None:
        start, end = 0, len(content)
        if "Range" in self.headers:
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            start, end = int(first), min(int(last) + 1, end) if last else end
        headers = {
            "Content-Range": f"bytes {start}-{end - 1}/{len(content)}",
            "ETag": f'"{hashlib.sha1(content, usedforsecurity=False).hexdigest()}"',
            "X-Repo-Commit": commit,
        }
        self._send(206 if "Range" in self.headers else 200, content[start:end], headers)

    def _json(self, status: int, content: Any, code: str | None = None) -> None:
        headers = {"Content-Type": "application/json", **({"X-Error-Code": code} if code else {})}
        self._send(status, json.dumps(content).encode(), headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test's output free of requests."""


@contextmanager
def hub_server(monkeypatch: pytest.MonkeyPatch) -> Generator[HubRepository]:
    """Run a server during the body; huggingface_hub is pointed at it, in this process and its children."""
    repository = HubRepository()
    handler = type("Handler", (_Handler,), {"repository": repository})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"

    # Before the variable is set, because the library reads it when it is imported.
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setenv("HF_ENDPOINT", address)
    try:
        yield repository
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
