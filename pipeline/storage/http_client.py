"""HTTP clients for fsspec with limits on redirects, waiting time and the size of answers."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any

from pipeline.storage.regular_files import MAX_FILE_BYTES

if TYPE_CHECKING:
    from types import SimpleNamespace

    from aiohttp import ClientResponse, ClientSession, StreamReader, TraceRequestRedirectParams
    from aiohttp.connector import Connection
    from yarl import URL

HTTP_PROTOCOLS = ("http", "https")
"""Protocols that fsspec opens with an aiohttp client."""


ANSWER_S = 300.0
"""Time for one request, including its answer."""

SILENCE_S = 60.0
"""Time that a server may send nothing within an answer."""


# fsspec runs a request in another thread, with the context of the thread that sends it.
_MAX_ANSWER_BYTES: ContextVar[int | None] = ContextVar("max_answer_bytes", default=None)


@contextmanager
def answers_up_to(num_bytes: int) -> Generator[None]:
    """Refuse larger answers to this thread's requests, also if they are small until they are unpacked."""
    token = _MAX_ANSWER_BYTES.set(num_bytes)
    try:
        yield
    finally:
        _MAX_ANSWER_BYTES.reset(token)


class RedirectRefusedError(OSError):
    """A redirect to another server, or to an invalid address, which was not followed."""


class OversizedAnswerError(OSError):
    """An answer that was larger than any file of a dataset may be."""


async def bounded_client(**options: Any) -> ClientSession:
    """Return an aiohttp session with bounded answers, which stays on one server.

    A redirect to another server raises RedirectRefusedError, and an answer without end OversizedAnswerError.
    The options are arguments of `aiohttp.ClientSession`.
    """
    import aiohttp

    # Without `sock_read`, a server that sends nothing would hold a request for the total time.
    options.setdefault("timeout", aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=30, sock_read=SILENCE_S))
    options.setdefault("response_class", _bounded_response())
    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(_refuse_other_server)
    traces = [*options.pop("trace_configs", []), trace]
    return aiohttp.ClientSession(**options, trace_configs=traces)


async def _refuse_other_server(
    session: ClientSession, context: SimpleNamespace, params: TraceRequestRedirectParams
) -> None:
    from yarl import URL

    del session, context
    headers = params.response.headers
    location = headers.get("Location") or headers.get("URI") or ""
    try:
        target = params.url.join(URL(location))
    except ValueError as err:
        raise RedirectRefusedError(f"{params.url.origin()} redirects to an invalid address: {err}") from err

    # Otherwise a server could make this machine read an address that only this machine can reach, such as the
    # metadata service of a cloud, as a caption.
    if not _same_server(params.url, target):
        raise RedirectRefusedError(
            f"{params.url.origin()} redirects to another server, {target.origin()}, which is not followed; "
            "if you trust that server, use an address on it in the recipe"
        )


def _same_server(url: URL, target: URL) -> bool:
    if not target.host or target.host != url.host:
        return False

    # A server that moves its visitors to https is still the same server.
    upgraded = (url.scheme, url.port, target.scheme, target.port) == ("http", 80, "https", 443)
    return upgraded or (url.scheme, url.port) == (target.scheme, target.port)


# A class with a base of aiohttp cannot be defined before aiohttp is imported, which only HTTP addresses need.
@cache
def _bounded_response() -> type[ClientResponse]:
    """Return a response class that reads its content into memory only up to the limit of its request."""
    from aiohttp import ClientResponse

    class BoundedResponse(ClientResponse):
        async def start(self, connection: Connection) -> ClientResponse:
            await super().start(connection)
            self.content: Any = _BoundedContent(self.content, _MAX_ANSWER_BYTES.get() or MAX_FILE_BYTES)
            return self

    return BoundedResponse


class _BoundedContent:
    """Content of an answer with aiohttp's methods; only reading everything at once has a limit."""

    def __init__(self, content: StreamReader, max_bytes: int) -> None:
        self._content = content
        self._max_bytes = max_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def read(self, num_bytes: int = -1) -> bytes:
        """Return at most `num_bytes` bytes, or everything."""
        if num_bytes >= 0:
            return await self._content.read(num_bytes)

        data = bytearray()
        while part := await self._content.readany():
            data += part
            if len(data) > self._max_bytes:
                raise OversizedAnswerError(f"the server sent more than {self._max_bytes:,} bytes")
        return bytes(data)
