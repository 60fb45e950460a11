"""A web server on this machine that receives alerts."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Received:
    """The requests of a server.

    Attributes:
        url: Address of the server, with a secret in its path.
        bodies: JSON bodies in the order of their arrival.
        statuses: Answers to the next requests; then 200.
        answers: Whether requests are answered at once; later ones wait until it is set.
    """

    url: str = ""
    bodies: list[Any] = field(default_factory=list[Any])
    statuses: list[int] = field(default_factory=list[int])
    answers: threading.Event = field(default_factory=threading.Event)


@contextmanager
def webhook_server() -> Generator[Received]:
    """Serve on a free port of the loopback interface."""
    received = Received()
    received.answers.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers["Content-Type"] == "application/json"
            received.bodies.append(json.loads(body))
            received.answers.wait(60)
            status = received.statuses.pop(0) if received.statuses else 200
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", received.url)
            self.end_headers()

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received.url = f"http://127.0.0.1:{server.server_port}/services/T0/SECRET?token=SECRET"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
