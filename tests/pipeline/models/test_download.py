"""Downloads from a local HTTP server that answers as the Hub does, with their progress in megabytes."""

from __future__ import annotations

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
