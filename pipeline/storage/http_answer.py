"""Answers of web servers whose content ends. aiohttp is imported here, and only when one is contacted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import ClientResponse

from pipeline.storage.regular_files import MAX_FILE_BYTES

if TYPE_CHECKING:
    from aiohttp import StreamReader
    from aiohttp.connector import Connection


class OversizedAnswerError(OSError):
    """An answer that was larger than any file of a dataset may be."""


class BoundedAnswer(ClientResponse):
    """A response whose content is read into memory only up to `MAX_FILE_BYTES`."""

    async def start(self, connection: Connection) -> ClientResponse:
        """Read the headers, as the base class does."""
        await super().start(connection)
        self.content: Any = _BoundedContent(self.content, MAX_FILE_BYTES)
        return self


class _BoundedContent:
    """Content of an answer with aiohttp's methods, of which only reading everything at once has a limit."""

    def __init__(self, content: StreamReader, max_bytes: int) -> None:
        self._content = content
        self._max_bytes = max_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def read(self, num_bytes: int = -1) -> bytes:
        """Return at most `num_bytes` bytes, or everything.

        Raises:
            OversizedAnswerError: Everything is more than the limit.
        """
        if num_bytes >= 0:
            return await self._content.read(num_bytes)

        data = bytearray()
        while part := await self._content.readany():
            data += part
            if len(data) > self._max_bytes:
                raise OversizedAnswerError(f"the server sent more than {self._max_bytes:,} bytes")
        return bytes(data)
