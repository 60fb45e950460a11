"""Errors of the Hub, from a local HTTP server that answers as the Hub does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.tiny_models import TinyModel

ROOT = Path(__file__).parents[3]

CODE = """\
import json, os, sys
from pathlib import Path
from pipeline.errors import ModelError
from pipeline.models.resolve import resolve_base
from tests.pipeline.model_recipe import recipe
errors = []
for base, revision, token in json.loads(sys.argv[2]):
    os.environ.pop("HF_TOKEN", None)
    os.environ.update({"HF_TOKEN": token} if token else {})
    try:
        resolve_base(recipe(Path(sys.argv[1]), base, revision=revision))
    except ModelError as err:
        errors.append(str(err))
print(json.dumps(errors))
"""

COMPONENT_CODE = """\
import json, sys
from pathlib import Path
from pipeline.errors import ModelError
from pipeline.models.components import resolve_components
from tests.pipeline.model_recipe import recipe
results = []
for name in json.loads(sys.argv[2]):
    try:
        folders = resolve_components(recipe(Path(sys.argv[1]), "models/tiny", components={"vae": name}))
        results.append(str(folders["vae"]))
    except ModelError as err:
        results.append(str(err))
print(json.dumps(results))
"""

CHECK_CODE = """\
import json, sys
from pathlib import Path
from pipeline.errors import ModelError
from pipeline.models.resolve import check_local_base
from pipeline.recipe import project
from tests.pipeline.model_recipe import recipe
project.project_root = lambda: Path(sys.argv[1])
errors = []
for base in json.loads(sys.argv[2]):
    try:
        check_local_base(recipe(Path(sys.argv[1]), base))
    except ModelError as err:
        errors.append(str(err))
print(json.dumps(errors))
"""

INVALID_TOKEN = "Invalid credentials in Authorization header"

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """The answers of the Hub, by the name of the requested repository; each request is recorded."""

    requests: list[str]
    repositories: ClassVar[dict[str, Path]] = {}

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.requests.append(f"{self.command} {self.path}")
        is_info = self.path.startswith("/api/models/")
        token = self.headers.get("Authorization")
        path = self.path.partition("?")[0].removeprefix("/api/models")
        served = next((name for name in self.repositories if f"{path}/".startswith(f"/{name}/")), None)
        if served:
            self._serve(self.repositories[served], path)
        elif token == "Bearer hf_expired":
            self._send(401, {"X-Error-Message": INVALID_TOKEN})
        elif "/someone/down" in self.path:
            self._send(503, {})
        elif "/someone/gated" in self.path and not is_info:
            self._send(403 if token else 401, {"X-Error-Code": "GatedRepo"})
        elif "/someone/tiny/revision/none" in self.path:
            self._send(404, {"X-Error-Code": "RevisionNotFound"})
        elif "/someone/single" in self.path and not is_info:
            self._send(404, {"X-Error-Code": "EntryNotFound"})
        elif any(f"/someone/{name}" in self.path for name in ("gated", "tiny", "single")) and is_info:
            self._send(200, {}, {"id": "someone/x", "modelId": "someone/x", "siblings": []})
        else:
            self._send(404 if token else 401, {"X-Error-Code": "RepoNotFound"})

    def _serve(self, folder: Path, path: str) -> None:
        """Answer for a repository with the files in a folder."""
        name = path.replace("/resolve/main/", f"/resolve/{COMMIT}/").partition(f"/resolve/{COMMIT}/")[2]
        if name and not (folder / name).is_file():
            self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        elif name:
            self._send(200, {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT}, (folder / name).read_bytes())
        elif "/tree/" in path:
            files = {str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()}
            entries = [
                {"type": "file", "path": name, "oid": name, "size": file.stat().st_size}
                for name, file in files.items()
            ]
            self._send(200, {}, entries)
        else:
            self._send(200, {}, {"id": "someone/x", "modelId": "someone/x", "siblings": [], "sha": COMMIT})

    def _send(self, status: int, headers: dict[str, str], content: Any = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content or {}).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test's output free of requests."""


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    """Return the address of a Hub and the list of its requests."""
    requests: list[str] = []
    handler = type("RecordingHub", (Hub,), {"requests": requests})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", requests
    server.shutdown()
    thread.join()
    server.server_close()


def resolve(folder: Path, argument: str, *, code: str = CODE, **environment: str) -> list[str]:
    """Resolve base models, or what `code` resolves, in another process, and return what it prints: errors.

    The test fails if a request is repeated: huggingface_hub then logs "Retrying in 1s".
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    process = subprocess.run(
        [sys.executable, "-c", code, str(folder), argument],
        cwd=ROOT,
        env={**inherited, "HF_HOME": str(folder / "hf"), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Retrying" not in process.stderr, process.stderr
    return json.loads(process.stdout)


def one_base(name: str) -> str:
    """Return the argument of `CODE` for a base model without revision and token."""
    return json.dumps([[name, None, None]])


REFUSED = [
    ("someone/gated", None, None, "is gated, and this machine is not", "hf auth login"),
    ("someone/gated-2", None, "hf_valid", "is gated, and the account", "accept the licence on"),
    ("someone/tiny-2", None, "hf_expired", "refuses the access token", "unset HF_TOKEN"),
    ("someone/tniy", None, "hf_valid", "does not exist on the Hub", "check the spelling of"),
    ("someone/tniy-2", None, None, "is not logged in", "check the spelling of"),
    ("someone/tiny", "none", None, "have the requested revision", "branch, tag or"),
    ("someone/single", None, None, "lacks a file", "to a complete repository"),
]
"""Repository, revision and token, with parts of the message and of the fix."""


def test_each_refusal_of_the_hub_has_its_own_message_and_fix_without_retries(
    tmp_path: Path, hub: tuple[str, list[str]]
) -> None:
    address, requests = hub
    errors = resolve(tmp_path, json.dumps([case[:3] for case in REFUSED]), HF_ENDPOINT=address)
    for (name, _, _, message, fix), error in zip(REFUSED, errors, strict=True):
        what, fixes = error.partition("\n  where: ")[0], error.partition("\n  fix:   ")[2]
        assert what.startswith(f"{name} is not a local folder and ")
        assert message in what
        assert ", model.base" in error
        assert fix in fixes
        # Other requests are huggingface_hub's own: it may ask for a list of coding agents once a day.
        attempts = [request for request in requests if f"{name}/" in f"{request}/"]
        # A model without the usual index may have the one of a modular pipeline.
        num_files = 2 if message == "lacks a file" else 1
        assert 1 <= len(attempts) <= 1 + num_files, attempts


def test_validation_accepts_a_hub_id_that_resembles_a_local_path_if_the_hub_has_it(
    tmp_path: Path, hub: tuple[str, list[str]]
) -> None:
    address, requests = hub
    (tmp_path / "someone" / "other-tiny").mkdir(parents=True)
    names = json.dumps(["someone/tiny", "someone/single", "someone/tniy", "else/tiny"])
    (error,) = resolve(tmp_path, names, code=CHECK_CODE, HF_ENDPOINT=address)
    assert error.startswith("someone/tniy is not a local folder and ")
    asked = {
        name for name in ("tiny", "single", "tniy") if any(f"someone/{name}" in each for each in requests)
    }
    assert asked == {"tiny", "single", "tniy"}
    assert not any("else/tiny" in request for request in requests)


def test_without_a_network_there_is_one_attempt(tmp_path: Path) -> None:
    (error,) = resolve(tmp_path, one_base("someone/tiny"), HF_ENDPOINT="http://127.0.0.1:9")
    assert "could not be downloaded from the Hub: " in error
    assert "Connection refused" in error
    assert "check the network" in error


@pytest.mark.parametrize(
    ("code", "argument"),
    [(CODE, one_base("someone/down")), (COMPONENT_CODE, json.dumps(["someone/down"]))],
    ids=["base model", "component"],
)
def test_a_hub_that_is_unavailable_gets_one_request(
    tmp_path: Path, hub: tuple[str, list[str]], code: str, argument: str
) -> None:
    address, requests = hub
    (error,) = resolve(tmp_path, argument, code=code, HF_ENDPOINT=address)
    assert "could not be downloaded from the Hub: " in error
    assert len([request for request in requests if "someone/down" in request]) == 1


def test_a_component_is_downloaded_from_a_model_or_from_a_repository_of_its_own(
    tmp_path: Path, hub: tuple[str, list[str]], tiny_sd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, requests = hub
    repositories = {"someone/model": tiny_sd, "someone/part": tiny_sd / "vae"}
    monkeypatch.setattr(Hub, "repositories", repositories)
    folders = resolve(tmp_path, json.dumps([*repositories]), code=COMPONENT_CODE, HF_ENDPOINT=address)
    expected = {file.name: file.read_bytes() for file in (tiny_sd / "vae").iterdir()}
    for folder in folders:
        assert {file.name: file.read_bytes() for file in Path(folder).iterdir()} == expected
    resolved = {request.partition(f"/resolve/{COMMIT}/")[2] for request in requests}
    assert resolved == {"", *expected, *(f"vae/{name}" for name in expected)}, "no other file is downloaded"


def test_a_base_model_with_nothing_but_a_modular_index_is_downloaded(
    tmp_path: Path, hub: tuple[str, list[str]], tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, requests = hub
    anima = tiny_model("Anima")
    monkeypatch.setattr(Hub, "repositories", {"someone/anima": anima})
    assert resolve(tmp_path, one_base("someone/anima"), HF_ENDPOINT=address) == []
    (snapshot,) = (tmp_path / "hf" / "hub").rglob(f"snapshots/{COMMIT}")
    assert {file: (snapshot / file).read_bytes() for file in files_of(anima)} == files_of(anima)

    requests.clear()
    assert resolve(tmp_path, one_base("someone/anima"), HF_ENDPOINT=address) == []
    assert not [request for request in requests if "someone/anima" in request], (
        "all files are on this machine"
    )


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the contents of the files in a folder, by their paths in it."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def test_offline_mode_requests_nothing(tmp_path: Path, hub: tuple[str, list[str]]) -> None:
    address, requests = hub
    (error,) = resolve(tmp_path, one_base("someone/tiny"), HF_ENDPOINT=address, HF_HUB_OFFLINE="1")
    assert "because HF_HUB_OFFLINE is set" in error
    assert "unset HF_HUB_OFFLINE" in error
    assert requests == []
