"""Downloads from the Hub: refused connections, and the progress of downloads from a local server."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import hf_xet
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError

from pipeline.errors import ModelError
from pipeline.models.hub import explain_download_errors, snapshot_commit


@pytest.fixture
def closed() -> Iterator[str]:
    """Return an address that refuses every connection."""
    with socket.socket() as closed_socket:
        closed_socket.bind(("127.0.0.1", 0))  # and never listens
        yield f"http://127.0.0.1:{closed_socket.getsockname()[1]}"


def request_hub(address: str, folder: Path) -> None:
    HfApi(endpoint=address).model_info("someone/tiny")


def download_large(address: str, folder: Path) -> None:
    hub = {"endpoint": address, "token": "none", "token_expiry_unix_secs": 9_999_999_999}
    with hf_xet.XetSession().new_file_download_group(**hub) as group:
        group.start_download_file(hf_xet.XetFileInfo("0" * 64, 1000), str(folder / "file"))


@pytest.mark.parametrize(
    ("request_", "error"), [(request_hub, HTTPError), (download_large, RuntimeError)], ids=["hub", "xet"]
)
def test_a_refused_connection_is_an_error_with_where_and_fix(
    tmp_path: Path,
    closed: str,
    request_: Callable[[str, Path], None],
    error: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_MAX_ATTEMPTS", "1")
    message = "someone/tiny is not a local folder and could not be downloaded"
    with (
        pytest.raises(ModelError, match=message) as excinfo,
        explain_download_errors("someone/tiny", "x.yaml, model.base"),
    ):
        request_(closed, tmp_path)
    assert isinstance(excinfo.value.__cause__, error)
    assert excinfo.value.where == "x.yaml, model.base"
    assert excinfo.value.fix is not None
    assert "check the network" in excinfo.value.fix


@pytest.mark.slow
def test_a_snapshot_with_nothing_but_its_index_is_an_error_if_the_hub_is_unreachable(
    tmp_path: Path, tiny_sd: Path, closed: str
) -> None:
    root = tmp_path / "hub" / "models--someone--tiny"
    snapshot = root / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0123abc")
    (snapshot / "model_index.json").write_bytes((tiny_sd / "model_index.json").read_bytes())
    code = "import sys; from pathlib import Path; from tests.pipeline.model_recipe import recipe\n"
    code += "from pipeline.errors import ModelError; from pipeline.models.resolve import resolve_base\n"
    code += (
        "try: resolve_base(recipe(Path(sys.argv[1]), 'someone/tiny'))\nexcept ModelError as err: print(err)"
    )
    env = {**os.environ, "HF_ENDPOINT": closed, "HF_HUB_CACHE": str(tmp_path / "hub")}
    stderr = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=Path(__file__).parents[3],
        env={**env, "HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "someone/tiny is not a local folder and could not be downloaded" in stderr
    assert "Connection refused" in stderr


ROOT = Path(__file__).parents[3]

COMMIT = "0123456789" * 4

FILES = {"model_index.json": b"{}", "vae/weights.safetensors": b"x" * 3_000_000, "other.bin": b"y" * 10}

CODE = """\
import sys
from pipeline.models.hub import download_files
from pipeline.reporting import progress
progress.FIRST_LINE_S = progress.LINE_INTERVAL_S = 0.0
names = ["model_index.json", "vae/weights.safetensors"]
print(download_files("someone/tiny", None, names, log=lambda line: print("LOG", line)))
"""


class Hub(BaseHTTPRequestHandler):
    """A repository with `FILES`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        headers = {"X-Repo-Commit": COMMIT}
        if path.startswith("/api/models/"):
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                for name, content in FILES.items()
            ]
            info = {"id": "someone/tiny", "modelId": "someone/tiny", "sha": COMMIT}
            info["siblings"] = [{"rfilename": name} for name in FILES]
            content = json.dumps(entries if "/tree/" in path else info).encode()
            headers["Content-Type"] = "application/json"
        else:
            content = FILES[path.split("/", 5)[5]]
            headers["ETag"] = f'"{hashlib.sha256(content).hexdigest()}"'

        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test's output free of requests."""


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_download_reports_its_progress_in_megabytes(hub: str, tmp_path: Path) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = {**inherited, "HF_HOME": str(tmp_path), "HF_ENDPOINT": hub}
    completed = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr
    *lines, snapshot = completed.stdout.splitlines()
    assert lines[-1].startswith("LOG downloading someone/tiny: 3 of 3 MB, ")
    assert " MB/s, 0:0" in lines[-1]
    assert completed.stderr == "", "the Hub's own progress bars are not drawn"
    folder = Path(snapshot)
    assert (folder / "vae" / "weights.safetensors").read_bytes() == FILES["vae/weights.safetensors"]
    assert not (folder / "other.bin").exists()


def test_only_a_folder_of_the_cache_has_a_commit(tmp_path: Path) -> None:
    assert snapshot_commit(tmp_path / "models--owner--name" / "snapshots" / "0a1b") == "0a1b"
    assert snapshot_commit(tmp_path / "models" / "base") is None
