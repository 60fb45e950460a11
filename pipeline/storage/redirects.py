"""HTTP clients for fsspec that do not follow a redirect away from the server of the dataset.

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


class RedirectRefusedError(OSError):
    """A redirect to another server, which was not followed."""


async def same_server_client(**options: Any) -> ClientSession:
    """Return an aiohttp session that raises RedirectRefusedError for a redirect to another server.

    Args:
        **options: Arguments of `aiohttp.ClientSession`.
    """
    import aiohttp

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
