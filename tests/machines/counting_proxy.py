"""An HTTP proxy in front of an S3 server: it counts requests, and calls the test at chosen ones."""

from __future__ import annotations

import http.client
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "expect", "content-length"}


class Request(NamedTuple):
    """A request: method, name of the object without its bucket, and whether it lists objects."""

    method: str
    name: str
    is_listing: bool

    @property
    def kind(self) -> str:
        """LIST, or the method."""
        return "LIST" if self.is_listing else self.method


class Answer(NamedTuple):
    """An answer in place of the server's."""

    status: int
    text: str


class CountingProxy:
    """A proxy for one S3 server.

    Attributes:
        url: Address of the proxy.
        requests: All requests so far, in order.
        before: Called with each request before it is forwarded; an exception breaks the connection. An answer
            is returned instead of forwarding the request.
        after: Called before the answer is returned; an exception breaks the connection.
    """

    def __init__(self, host: str, server_url: str) -> None:
        """Listen on a free port of the address `host`."""
        self.requests: list[Request] = []
        self.before: Callable[[Request], Answer | None] = lambda request: None
        self.after: Callable[[Request], None] = lambda request: None
        upstream = urlsplit(server_url).netloc
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self) -> None:
                try:
                    proxy._forward(self, upstream)
                except (OSError, http.client.HTTPException):
                    self.close_connection = True  # as a server that has died would

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = forward  # noqa: N815 - names of http.server

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer((host, 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def counts(self) -> Counter[str]:
        """Return the number of requests of each kind."""
        return Counter(request.kind for request in self.requests)

    def _forward(self, handler: BaseHTTPRequestHandler, upstream: str) -> None:
        url = urlsplit(handler.path)
        name = url.path.lstrip("/").partition("/")[2]
        is_listing = handler.command == "GET" and bool({"list-type", "prefix"} & set(parse_qs(url.query)))
        request = Request(handler.command, name, is_listing)
        self.requests.append(request)
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        if (own := self.before(request)) is not None:
            handler.send_response_only(own.status)
            handler.send_header("Content-Length", str(len(own.text)))
            handler.end_headers()
            handler.wfile.write(own.text.encode())
            return

        # The client signed the Host header, so it is forwarded unchanged.
        connection = http.client.HTTPConnection(upstream, timeout=60)
        try:
            headers = {
                name: value for name, value in handler.headers.items() if name.lower() not in _HOP_BY_HOP
            }
            if body or handler.command in ("PUT", "POST"):
                headers["Content-Length"] = str(len(body))
            connection.request(handler.command, handler.path, body or None, headers)
            response = connection.getresponse()
            answer = response.read()
            self.after(request)

            handler.send_response_only(response.status, response.reason)
            for name, value in response.getheaders():
                if name.lower() not in _HOP_BY_HOP:
                    handler.send_header(name, value)
            length = response.getheader("Content-Length") if handler.command == "HEAD" else str(len(answer))
            handler.send_header("Content-Length", length or "0")
            handler.end_headers()
            handler.wfile.write(answer)
        finally:
            connection.close()
