"""A network on this host: a bridge that machines plug into, with the host itself at its first address."""

from __future__ import annotations

import os
import shutil

from tests.machines.children import call

PROGRAMS = ("ip", "unshare", "nsenter", "setpriv", "mount")

_PREFIX = "lltest"
"""Beginning of the names of bridges; the rest is the id of the process that made it."""

_FIRST_TWO = "198.18"
"""Addresses that RFC 2544 reserves for tests of networks, so no host of a real network has them."""


class Network:
    """A bridge with 253 addresses for machines.

    Attributes:
        host: Address of this host in the network, on which services listen.
    """

    def __init__(self) -> None:
        """Create the bridge, and remove those of test processes that were killed."""
        for name in _bridges():
            if not os.path.exists(f"/proc/{name.removeprefix(_PREFIX)}"):  # noqa: PTH110 - not a file
                call("ip", "link", "delete", name, check=False)

        self._bridge = f"{_PREFIX}{os.getpid()}"
        self._subnet = f"{_FIRST_TWO}.{os.getpid() % 254}"
        self._num_machines = 0
        self.host = f"{self._subnet}.1"
        call("ip", "link", "add", self._bridge, "type", "bridge")
        call("ip", "address", "add", f"{self.host}/24", "dev", self._bridge)
        call("ip", "link", "set", self._bridge, "up")

    def plug_in(self, pid: int) -> str:
        """Connect the network namespace of process `pid`, and return its new address.

        The connection disappears with the namespace.
        """
        self._num_machines += 1
        address = f"{self._subnet}.{1 + self._num_machines}"
        here, there = f"v{os.getpid()}.{self._num_machines}", "eth0"
        call("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", str(pid))
        call("ip", "link", "set", here, "master", self._bridge, "up")
        inside = ("nsenter", "--target", str(pid), "--net", "ip")
        call(*inside, "address", "add", f"{address}/24", "dev", there)
        call(*inside, "link", "set", there, "up")
        call(*inside, "link", "set", "lo", "up")
        return address

    def close(self) -> None:
        """Delete the bridge."""
        call("ip", "link", "delete", self._bridge, check=False)


def reason_to_skip() -> str | None:
    """Return why this system cannot have machines, or None if it can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"programs are not installed: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        Network().close()
    except AssertionError as err:
        return f"this system allows no network namespaces: {err}"
    return None


def _bridges() -> list[str]:
    listed = call("ip", "-brief", "link", "show", "type", "bridge", check=False)
    return [line.split()[0] for line in listed.splitlines() if line.startswith(_PREFIX)]
