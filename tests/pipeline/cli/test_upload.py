"""Uploads to a local server that answers as the Hub does."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.errors import TrainingError
from pipeline.trained_lora.export.hub_upload import prepare_upload, upload

ROOT = Path(__file__).parents[3]

TOKEN = "hf_of_the_test"

CARD = """\
---
base_model: "someone/base"
---

```python
pipe.load_lora_weights("<this folder>")
```
"""

CODE = """\
import sys
from pathlib import Path
from pipeline.errors import TrainingError
from pipeline.trained_lora.export.hub_upload import prepare_upload, upload
prepared = prepare_upload(Path(sys.argv[1]), "flowers", sys.argv[2], licence="cc-by-4.0")
try:
    print(upload(prepared, public=sys.argv[3] == "public"))
except TrainingError as err:
    print(err)
"""


class Hub(BaseHTTPRequestHandler):
    """The Hub's protocol for uploads without Xet: preupload, LFS and commit."""

    repositories: dict[str, dict[str, bytes]]
    private: dict[str, bool]
    large: dict[str, bytes]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(401, {"error": "Invalid credentials"})
        elif self.path == "/api/repos/create":
            request = json.loads(body)
            name = "/".join(filter(None, (request.get("organization"), request["name"])))
            self.private[name] = request["visibility"] == "private"
            self.repositories.setdefault(name, {})
            self._send(200, {"url": f"https://huggingface.co/{name}", "id": name, "name": name})
        elif "/preupload/" in self.path:
            files = [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for each in json.loads(body)["files"]
            ]
            self._send(200, {"files": files})
        elif self.path.endswith("/info/lfs/objects/batch"):
            self._send(
                200, {"transfer": "basic", "objects": [*map(self._place, json.loads(body)["objects"])]}
            )
        elif "/commit/" in self.path:
            self._commit("/".join(self.path.split("/")[3:5]), body)
        else:
            self._send(200, {})

    def do_GET(self) -> None:
        # huggingface_hub looks for a repository that it may not create.
        is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        self._send(404 if is_known else 401, {"error": "Invalid credentials"})

    def do_PUT(self) -> None:
        self.large[self.path.rsplit("/", 1)[1]] = self.rfile.read(int(self.headers["Content-Length"]))
        self._send(200, {})

    def _place(self, each: dict[str, Any]) -> dict[str, Any]:
        place = f"http://{self.headers['Host']}/storage/{each['oid']}"
        return {**each, "authenticated": True, "actions": {"upload": {"href": place}}}

    def _commit(self, name: str, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.repositories[name][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.repositories[name][value["path"]] = self.large[value["oid"]]
        self._send(200, {"commitUrl": f"https://huggingface.co/{name}/commit/1", "commitOid": "1"})

    def _send(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test's output free of requests."""


@pytest.fixture
def hub() -> Iterator[tuple[str, type[Hub]]]:
    """Return the address of a Hub and its state."""
    state = type("State", (Hub,), {"repositories": {}, "private": {}, "large": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), state)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", state
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    """A folder with the files of a published LoRA."""
    folder = tmp_path / "lora"
    folder.mkdir()
    for name in ("pytorch_lora_weights", "flowers_kohya", "flowers_comfyui"):
        (folder / f"{name}.safetensors").write_bytes(name.encode() * 100)
    for name in ("provenance.json", "samples.parquet", "samples.jpg"):
        (folder / name).write_bytes(name.encode())
    (folder / "README.md").write_text(CARD)
    return folder


def uploaded(lora: Path, address: str, *arguments: str, token: str = TOKEN) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    variables = {"HF_ENDPOINT": address, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"}
    process = subprocess.run(
        [sys.executable, "-c", CODE, str(lora), *arguments],
        cwd=ROOT,
        env={**inherited, **variables, "HF_HOME": str(lora.parent / "hf")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert token not in process.stdout + process.stderr
    return process.stdout


def test_a_private_repository_gets_the_files_but_no_captions(lora: Path, hub: tuple[str, type[Hub]]) -> None:
    address, state = hub
    output = uploaded(lora, address, "anna/flowers-lora", "private")

    assert output == f"{address}/anna/flowers-lora\n"
    assert state.private == {"anna/flowers-lora": True}
    files = state.repositories["anna/flowers-lora"]
    kept_here = {"samples.parquet"}
    assert set(files) == {path.name for path in lora.iterdir()} - kept_here
    for name, content in files.items():
        if name != "README.md":
            assert content == (lora / name).read_bytes()
    assert {hashlib.sha256(each).hexdigest() for each in state.large.values()} == set(state.large)

    card = files["README.md"].decode()
    assert yaml.safe_load(card.split("---")[1]) == {"license": "cc-by-4.0", "base_model": "someone/base"}
    assert 'pipe.load_lora_weights("anna/flowers-lora")' in card
    assert (lora / "README.md").read_text() == CARD


def test_the_repository_is_public_on_request(lora: Path, hub: tuple[str, type[Hub]]) -> None:
    address, state = hub
    uploaded(lora, address, "anna/flowers-lora", "public")

    assert state.private == {"anna/flowers-lora": False}


def test_a_refused_token_is_an_error_with_a_fix(lora: Path, hub: tuple[str, type[Hub]]) -> None:
    address, state = hub
    output = uploaded(lora, address, "anna/flowers-lora", "private", token="hf_expired")

    assert output.startswith("the Hub refuses the upload: ")
    assert "hf auth login" in output
    assert state.repositories == {}


def test_nothing_is_sent_without_a_token(lora: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("HF_TOKEN", raising=False)

    prepared = prepare_upload(lora, "flowers", "anna/flowers-lora", licence=None)
    with pytest.raises(TrainingError, match="not logged in"):
        upload(prepared, public=False)


def test_an_upload_needs_a_published_lora_and_a_name_with_an_owner(lora: Path) -> None:
    with pytest.raises(TrainingError, match="invalid name of a repository: the owner is missing"):
        prepare_upload(lora, "flowers", "flowers-lora", licence=None)
    (lora / "flowers_kohya.safetensors").unlink()
    with pytest.raises(TrainingError, match="lacks flowers_kohya"):
        prepare_upload(lora, "flowers", "anna/flowers-lora", licence=None)
