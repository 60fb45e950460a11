"""Copies of a folder that fsspec can read: in an archive, on a web server, in a bucket of an S3 server."""

from __future__ import annotations

import socket
import tarfile
import threading
import uuid
import zipfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

S3_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "anybody",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass
class PublishedFolder:
    """A published copy of a folder; call `publish` again after a change.

    Attributes:
        address: Address of the copy.
        publish: Updates the copy to the folder's current files.
        quote: Returns the name of a file in the copy, from its name in the folder.
    """

    address: str
    publish: Callable[[], None]
    quote: Callable[[str], str] = str


@contextmanager
def s3_server() -> Generator[str]:
    """Run an in-memory S3 server during the body, and provide its URL."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


class StoppableS3Server:
    """An in-memory S3 server on a fixed port; its objects survive a restart."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._server: Any = None

    def start(self) -> None:
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self._port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()


@contextmanager
def web_server(folder: Path) -> Generator[str]:
    """Serve `folder` over HTTP during the body, and provide the URL."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def files_of(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def published_in_bucket(folder: Path, protocol: str = "s3") -> PublishedFolder:
    """Publish to a new bucket of the server in the environment, or to this process's memory."""
    import fsspec

    files = fsspec.filesystem(protocol, skip_instance_cache=True)
    bucket = f"bucket-{uuid.uuid4().hex[:8]}"
    files.mkdir(bucket)

    def publish() -> None:
        remote_names = {name for name in files.find(f"{bucket}/photos") if name.strip("/")}
        local_files = {f"{bucket}/photos/{name}": path for name, path in files_of(folder).items()}
        for name in remote_names - set(local_files) - {f"/{key}" for key in local_files}:
            files.rm_file(name)
        for name, path in local_files.items():
            if not files.exists(name) or files.cat_file(name) != path.read_bytes():
                files.pipe_file(name, path.read_bytes())

    publish()
    return PublishedFolder(f"{protocol}://{bucket}/photos", publish)


def published_in_archive(folder: Path, archive: Path) -> PublishedFolder:
    """Publish below `photos` in `archive`; its suffix decides between zip and tar."""
    kind = "zip" if archive.suffix == ".zip" else "tar"

    def publish() -> None:
        new_archive = archive.with_name(f"new-{archive.name}")
        if kind == "zip":
            with zipfile.ZipFile(new_archive, "w") as file:
                for name, path in files_of(folder).items():
                    file.write(path, f"photos/{name}")
        else:
            with tarfile.open(new_archive, "w:gz" if archive.suffix == ".gz" else "w") as file:
                file.add(folder, "photos")
        new_archive.replace(archive)

    publish()
    return PublishedFolder(f"{kind}://photos::{archive}", publish)
