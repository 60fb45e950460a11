"""Old training runs in S3, deleted by one of two machines."""

from __future__ import annotations

import threading
from pathlib import Path

from pipeline.storage.addresses import Url
from pipeline.storage.remote_folder import RemoteFolder
from tests.machines import ceph
from tests.machines.children import until
from tests.machines.counting_proxy import CountingProxy, Request
from tests.machines.machine import Machine
from tests.machines.project import Project, latentline

OLDEST, OLD, NEWEST = ("1" * 16, "2" * 16, "3" * 16)

FILES = ("run.json", "finished.json", "lora/lora.safetensors", *(f"logs/{number}" for number in range(20)))

GC = ("gc", "small", "--keep-runs", "1", "--delete")


def test_a_killed_deletion_on_one_machine_is_finished_by_another(
    two_machines: list[Machine], s3: str, proxy: CountingProxy, tiny_sd: Path
) -> None:
    """Machine a is killed at its seventh deletion, and b at first cannot know whether a still deletes."""
    remote = RemoteFolder(Url(f"{s3}/out"))
    for run in (OLDEST, OLD, NEWEST):
        for name in FILES:
            remote.put(f"runs/{run}/{name}", b"{}")
    projects = [Project(each, tiny_sd, f"{s3}/cache", ceph.environment(proxy.url)) for each in two_machines]
    for project in projects:
        project.data.mkdir()
        project.write_recipe(output_dir=f"{s3}/out")
        project.deploy()
    a, b = projects
    num_deletions, is_killed = 0, threading.Event()

    def hold_seventh(request: Request) -> None:
        nonlocal num_deletions
        num_deletions += request.method == "DELETE"
        if num_deletions == 7:
            assert is_killed.wait(60)
            raise ConnectionError

    proxy.before = hold_seventh
    child = a.machine.start(latentline(*GC), log="gc.log", **a.variables())
    until(lambda: num_deletions == 7, "the seventh deletion", seconds=120, child=child)
    for pid in a.machine.pids("keep-runs"):
        a.machine.kill(pid)
    child.wait(60)
    is_killed.set()
    proxy.before = lambda request: None

    def names() -> dict[str, str]:
        return {name.split("/")[1]: name for name in sorted(remote.list_files("runs"))}

    left = names()
    assert set(left) == {OLDEST, OLD, NEWEST}
    listed = b.latentline(*GC[:-1])
    lines = [line for line in listed.stdout.splitlines() if "is deleting this run, or has stopped" in line]
    assert len(lines) == 1, listed.stdout
    assert OLDEST in listed.stdout
    assert OLD in listed.stdout
    assert "interrupted deletion" not in listed.stdout
    # The rest is deleted once the lease of machine a has been silent for a minute.
    until(lambda: b.latentline(*GC) and set(names()) == {NEWEST}, "the end of the deletion", seconds=240)
    assert {name.split("/")[1] for name in remote.list_files("runs")} == {NEWEST}
    assert len(remote.list_files(f"runs/{NEWEST}")) == len(FILES)
