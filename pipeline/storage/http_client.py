"""HTTP clients for fsspec with limits on redirects, waiting time and the size of answers.

A web server decides where its redirects lead. Without this, one that serves a dataset could make this machine
read an address that only this machine can reach, such as the metadata service of a cloud, as a caption.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import SimpleNamespace

    from aiohttp import ClientSession, TraceRequestRedirectParams
    from yarl import URL

HTTP_PROTOCOLS = ("http", "https")
"""Protocols that fsspec opens with an aiohttp client."""


ANSWER_S = 300.0
"""Time for one request, including its answer."""

SILENCE_S = 60.0
"""Time that a server may send nothing within an answer."""


class RedirectRefusedError(OSError):
    """A redirect to another server, which was not followed."""


async def bounded_client(**options: Any) -> ClientSession:
    """Return an aiohttp session with bounded answers, which stays on one server.

    A redirect to another server raises RedirectRefusedError, and an answer without end OversizedAnswerError.

    Args:
        **options: Arguments of `aiohttp.ClientSession`. A `timeout` among them replaces the default.
    """
    import aiohttp

    from pipeline.storage.http_answer import BoundedAnswer

    options.setdefault("timeout", aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=30, sock_read=SILENCE_S))
    options.setdefault("response_class", BoundedAnswer)
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
    target = params.url.join(URL(location))
    if not _same_server(params.url, target):
        raise RedirectRefusedError(
            f"{params.url.origin()} redirects to another server, {target.origin()}, which is not followed; "
            "if you trust that server, set datasets[].path to an address on it"
        )


def _same_server(url: URL, target: URL) -> bool:
    """Return True for the same scheme, host and port, and for a change from http to https on one host."""
    if not target.host or target.host != url.host:
        return False
    upgraded = (url.scheme, url.port, target.scheme, target.port) == ("http", 80, "https", 443)
    return upgraded or (url.scheme, url.port) == (target.scheme, target.port)
