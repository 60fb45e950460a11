"""Ceph's S3 gateway in front of a cluster of one monitor and one object store daemon, all in one folder.

Debian's packages `radosgw`, `ceph-mon` and `ceph-osd` contain the programs. Objects are stored in memory.
The programs of the cluster trust each other; the gateway checks the keys of its clients.
"""

from __future__ import annotations

import shutil
import socket
import uuid
from pathlib import Path

from tests.machines.children import Child, call, until

PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "radosgw", "radosgw-admin")

ACCESS_KEY = "latentline"
SECRET_KEY = "the secret of a test"

_SETTINGS = """
[global]
fsid = {fsid}
auth cluster required = none
auth service required = none
auth client required = none
mon host = [v2:{monitor}]
public addr = {host}
cluster addr = {host}
run dir = {folder}
log file = {folder}/$name.log
pid file =
admin socket =
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000

[mon]
mon data = {folder}/mon
mon cluster log file = {folder}/cluster.log

[osd]
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = {memory_bytes}
osd class load list = *
osd class default list = *

[client.rgw]
rgw data = {folder}/rgw
ms mon client mode = crc
rgw frontends = beast endpoint={host}:{port}
rgw enable usage log = false
rgw dynamic resharding = false
"""


class Gateway:
    """A running gateway; the objects survive its `stop` and `start`."""

    def __init__(self, folder: Path, *, host: str, memory_bytes: int = 4 * 2**30) -> None:
        """Start the cluster and the gateway in an empty folder, on free ports of the address `host`."""
        self._folder = folder
        self.port, monitor_port = _two_free_ports(host)
        self.url = f"http://{host}:{self.port}"
        self._fsid, self._monitor = str(uuid.uuid4()), f"{host}:{monitor_port}"
        settings = {"folder": folder, "host": host, "port": self.port, "memory_bytes": memory_bytes}
        settings |= {"fsid": self._fsid, "monitor": self._monitor}
        self._conf = str(folder / "ceph.conf")
        Path(self._conf).write_text(_SETTINGS.format(**settings), encoding="utf-8")
        for name in ("mon", "osd", "rgw"):
            (folder / name).mkdir()

        self._cluster: list[Child] = []
        self._gateway: Child | None = None
        try:
            self._start_cluster()
            self.start()
            self._create_user()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Start the gateway, and return when it accepts connections."""
        self._gateway = self._child("radosgw", "-n", "client.rgw")
        host = self.url.removeprefix("http://").partition(":")[0]
        until(lambda: _accepts(host, self.port), "the S3 gateway", seconds=90, child=self._gateway)

    def stop(self) -> None:
        """Kill the gateway, as a crash of its machine would."""
        if self._gateway is not None:
            self._gateway.kill()
            self._gateway = None

    def close(self) -> None:
        """End all processes."""
        self.stop()
        for child in reversed(self._cluster):
            child.kill()

    def environment(self) -> dict[str, str]:
        """Return the variables with which s3fs finds the gateway."""
        return environment(self.url)

    def _start_cluster(self) -> None:
        monmap = str(self._folder / "monmap")
        call("monmaptool", "--create", "--fsid", self._fsid, "--addv", "a", f"[v2:{self._monitor}]", monmap)
        call("ceph-mon", "-c", self._conf, "-i", "a", "--mkfs", "--monmap", monmap)
        self._cluster.append(self._child("ceph-mon", "-i", "a"))
        osd_uuid = str(uuid.uuid4())
        osd_id = self._ceph("osd", "new", osd_uuid).strip()
        call("ceph-osd", "-c", self._conf, "-i", osd_id, "--mkfs", "--osd-uuid", osd_uuid)
        self._cluster.append(self._child("ceph-osd", "-i", osd_id))

    def _create_user(self) -> None:
        keys = ("--access-key", ACCESS_KEY, "--secret-key", SECRET_KEY)
        names = ("--uid", "latentline", "--display-name", "latentline")
        call("radosgw-admin", "-c", self._conf, "-n", "client.rgw", "user", "create", *names, *keys)

    def _ceph(self, *arguments: str) -> str:
        return call("ceph", "-c", self._conf, "--connect-timeout", "30", *arguments)

    def _child(self, program: str, *arguments: str) -> Child:
        return Child([program, "-c", self._conf, "-f", *arguments], log=self._folder / f"{program}.out")


def environment(url: str) -> dict[str, str]:
    """Return the variables with which s3fs finds the gateway, or a proxy of it, at `url`."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL_S3": url,
    }


def missing_programs() -> list[str]:
    """Return the programs that are not installed."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


def _two_free_ports(host: str) -> tuple[int, int]:
    """Return two different ports, both probed at once: two probes in a row could find the same port."""
    with socket.socket() as one, socket.socket() as two:
        one.bind((host, 0))
        two.bind((host, 0))
        return one.getsockname()[1], two.getsockname()[1]


def _accepts(host: str, port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(1)
        return client.connect_ex((host, port)) == 0
