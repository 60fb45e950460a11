"""A client of an MCP server that is a process: JSON-RPC in lines on standard input and output."""

from __future__ import annotations

import itertools
import json
import subprocess
from types import TracebackType
from typing import Any


class McpClient:
    """The server's process while the body runs."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        """Start the server."""
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._numbers = itertools.count(1)

    def __enter__(self) -> McpClient:
        """Agree on the protocol with the server."""
        about = {"protocolVersion": "2025-06-18", "capabilities": {}}
        self._request("initialize", {**about, "clientInfo": {"name": "test", "version": "1"}})
        self._send({"method": "notifications/initialized"})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the server."""
        self._process.terminate()
        self._process.communicate()

    def tools(self) -> set[str]:
        """Return the names of the server's tools."""
        return {tool["name"] for tool in self._request("tools/list", {})["tools"]}

    def call(self, name: str, **arguments: Any) -> Any:
        """Return the result of a tool.

        Raises:
            RuntimeError: The tool has failed.
        """
        result = self._request("tools/call", {"name": name, "arguments": arguments})
        if result.get("isError"):
            raise RuntimeError("".join(part["text"] for part in result["content"]))
        # A list is wrapped in an object.
        content = result["structuredContent"]
        return content.get("result", content)

    def _request(self, method: str, params: dict[str, Any]) -> Any:
        number = next(self._numbers)
        self._send({"id": number, "method": method, "params": params})
        assert self._process.stdout is not None
        # The server may also send notifications.
        for line in self._process.stdout:
            message = json.loads(line)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
        raise AssertionError("the MCP server has ended")

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        self._process.stdin.flush()
