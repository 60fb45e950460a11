"""The mirror between a working copy and an address, on an S3 server and in memory."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from pipeline.errors import StoreError
from pipeline.storage import retry
from pipeline.storage.addresses import Url
from pipeline.storage.atomic import write_text
from pipeline.storage.mirror import Mirror
from tests.small_disk import on_small_disk


@pytest.fixture(params=["memory", "s3"])
def address(request: pytest.FixtureRequest) -> Url:
    """An empty folder on the S3 server, or in this process's memory."""
    if request.param == "s3":
        request.getfixturevalue("s3")
    bucket = f"bucket-{uuid.uuid4().hex[:8]}"
    fsspec.filesystem(request.param, skip_instance_cache=True).mkdir(bucket)
    return Url(f"{request.param}://{bucket}/flowers")


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        write_text(folder / "tables" / name, text)


def texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text("utf-8") for path in sorted((folder / "tables").iterdir())}


def test_another_machine_pulls_what_was_pushed_and_only_changes_are_transferred(
    address: Url, tmp_path: Path
) -> None:
    one, two = Mirror(address, tmp_path / "one"), Mirror(address, tmp_path / "two")
    write(one.folder, a="1", b="2")
    assert one.push("tables/*") == ["tables/a", "tables/b"]
    assert one.push("tables/*") == []
    assert one.pull("tables/*") == []
    assert two.pull("tables/*") == ["tables/a", "tables/b"]
    assert texts(two.folder) == {"a": "1", "b": "2"}
    write(two.folder, a="3")
    assert two.push("tables/*") == ["tables/a"]
    assert one.pull("tables/*") == ["tables/a"]
    os.utime(one.folder / "tables/a")
    assert one.push("tables/*") == [], "a new time without new content must not be pushed"


def test_an_empty_working_copy_pulls_again_and_deletes_nothing(address: Url, tmp_path: Path) -> None:
    mirror = Mirror(address, tmp_path / "copy")
    write(mirror.folder, a="1", b="2")
    mirror.push("tables/*")
    (mirror.folder / "tables/a").unlink()

    # A cleaner of the scratch folder is no reason to delete files at the address.
    later = Mirror(address, mirror.folder)
    assert later.push("tables/*") == []
    assert later.pull("tables/*") == ["tables/a"]


def test_a_file_deleted_since_it_was_pulled_is_deleted_at_the_address(address: Url, tmp_path: Path) -> None:
    mirror = Mirror(address, tmp_path / "copy")
    write(mirror.folder, a="1", b="2")
    mirror.push("tables/*")
    (mirror.folder / "tables/a").unlink()
    mirror.push("tables/*")
    assert mirror.names("*") == ["tables/b"]


def test_a_file_deleted_by_another_machine_is_deleted_unless_it_changed_here(
    address: Url, tmp_path: Path
) -> None:
    one, two = Mirror(address, tmp_path / "one"), Mirror(address, tmp_path / "two")
    write(one.folder, a="1", b="2", c="3", d="4")
    one.push("tables/*")
    two.pull("tables/*")
    two.remove("tables/a", "tables/b", "tables/c")
    write(one.folder, b="changed")
    os.utime(one.folder / "tables/c")

    assert Mirror(address, one.folder).pull("tables/a", "tables/b") == ["tables/a"]
    assert texts(one.folder) == {"b": "changed", "c": "3", "d": "4"}, "c was not pulled"
    write(one.folder, a="1")
    assert one.push("tables/*") == ["tables/a", "tables/b"], "the same bytes as before are missing there"
    assert one.names("*") == ["tables/a", "tables/b", "tables/d"]


def test_a_lost_address_is_filled_from_the_working_copy(address: Url, tmp_path: Path) -> None:
    mirror = Mirror(address, tmp_path / "copy")
    write(mirror.folder, a="1")
    write_text(mirror.folder / "lora/b", "2")
    mirror.push("*")
    for name in mirror.names("*"):
        mirror.remote.remove(name)

    later = Mirror(address, mirror.folder)
    assert later.pull("tables/*") == []
    assert later.push("tables/*") == ["tables/a"]
    assert later.pull("lora/*") == []
    assert later.push("lora/*") == ["lora/b"]


def test_a_file_that_another_process_pushes_during_a_pull_is_not_taken_for_a_deleted_one(
    address: Url, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = Mirror(address, tmp_path / "copy")
    write(mirror.folder, a="1")
    mirror.push("tables/*")
    list_files = mirror.remote.list_files

    def list_and_push(*names: str, **options: str) -> dict[str, dict[str, object]]:
        listed = list_files(*names, **options)
        write(mirror.folder, b="2")
        Mirror(address, mirror.folder).push("tables/b")
        return listed

    with monkeypatch.context() as patched:
        patched.setattr(mirror.remote, "list_files", list_and_push)
        mirror.pull("tables/*")
    assert texts(mirror.folder) == {"a": "1", "b": "2"}
    assert mirror.push("tables/*") == []


def test_a_file_that_an_interrupted_deletion_has_removed_is_pushed_again(
    address: Url, tmp_path: Path
) -> None:
    mirror = Mirror(address, tmp_path / "copy")
    write(mirror.folder, a="1", b="2")
    mirror.push("tables/*")
    calls: list[int] = []

    def refuse_second() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        mirror.remove("tables/a", "tables/b", guard=refuse_second)
    assert Mirror(address, mirror.folder).push("tables/*") == ["tables/a"]


def test_if_both_sides_changed_the_address_wins(address: Url, tmp_path: Path) -> None:
    one, two = Mirror(address, tmp_path / "one"), Mirror(address, tmp_path / "two")
    write(one.folder, a="1")
    one.push("tables/*")
    two.pull("tables/*")
    write(two.folder, a="of two")
    two.push("tables/*")
    write(one.folder, a="never pushed")
    one.pull("tables/*")
    assert texts(one.folder) == {"a": "of two"}


def test_a_change_that_was_not_pushed_survives_a_pull_and_is_pushed_next(
    address: Url, tmp_path: Path
) -> None:
    mirror = Mirror(address, tmp_path / "copy")
    write(mirror.folder, a="1")
    mirror.push("tables/*")
    write(mirror.folder, a="2")
    later = Mirror(address, mirror.folder)
    assert later.pull("tables/*") == []
    assert later.push("tables/*") == ["tables/a"]


@pytest.mark.parametrize("interrupted_at", range(3))
def test_an_interrupted_upload_leaves_no_marker(
    address: Url, tmp_path: Path, interrupted_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = Mirror(address, tmp_path / "copy")
    step = mirror.folder / "runs/r/checkpoints/step-00000002"
    for version in ("first", "second"):
        for name in ("adapter.safetensors", "optimizer.pt", "COMPLETE"):
            write_text(step / name, f"{name} {version}")
        if version == "first":
            mirror.push("runs/*")

    upload, num_calls = mirror.remote.upload, 0

    def killed(path: Path, name: str, *, create: bool = False) -> str:
        nonlocal num_calls
        if num_calls == interrupted_at:
            raise KeyboardInterrupt
        num_calls += 1
        return upload(path, name, create=create)

    with monkeypatch.context() as patched:
        patched.setattr(mirror.remote, "upload", killed)
        with pytest.raises(KeyboardInterrupt):
            mirror.push("runs/*")
    assert not [name for name in mirror.names("*") if name.endswith("COMPLETE")]
    mirror = Mirror(address, mirror.folder)
    mirror.push("runs/*")
    other = Mirror(address, tmp_path / "other")
    assert len(other.pull("runs/*")) == 3
    assert {path.read_text("utf-8").split()[1] for path in other.folder.rglob("step-*/*")} == {"second"}


def test_a_file_that_another_machine_replaces_right_after_an_upload_is_pulled(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("right-after")
    one, two = (Mirror(Url("s3://right-after/out"), tmp_path / name) for name in ("one", "two"))
    write(one.folder, a="of one")
    write(two.folder, a="of two")
    upload = one.remote.upload

    def upload_before_two(path: Path, name: str, *, create: bool = False) -> str:
        version = upload(path, name, create=create)
        two.push("tables/*")
        return version

    monkeypatch.setattr(one.remote, "upload", upload_before_two)
    one.push("tables/*")
    assert one.pull("tables/*") == ["tables/a"], s3
    assert texts(one.folder) == {"a": "of two"}


def test_a_guard_is_called_before_each_change_and_ends_a_push(address: Url, tmp_path: Path) -> None:
    mirror = Mirror(address, tmp_path / "copy")
    write(mirror.folder, a="1", b="2")
    mirror.push("tables/*")
    write(mirror.folder, a="3")
    (mirror.folder / "tables/b").unlink()
    calls: list[int] = []

    def refuse_second() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        mirror.push("tables/*", guard=refuse_second)
    assert mirror.names("*") == ["tables/a", "tables/b"], "b is not deleted"
    assert mirror.remote.read("tables/a") == b"3"


def test_a_guarded_upload_does_not_replace_a_file_that_appeared_meanwhile(s3: str, tmp_path: Path) -> None:
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("meanwhile")
    mirror = Mirror(Url("s3://meanwhile/out"), tmp_path / "copy")
    write(mirror.folder, a="of this machine")
    is_taken: list[bool] = []

    def guard() -> None:
        if is_taken:
            raise RuntimeError
        is_taken.append(True)
        mirror.remote.put("tables/a", b"of the other")

    with pytest.raises(RuntimeError):
        mirror.push("tables/*", guard=guard)
    assert mirror.remote.read("tables/a") == b"of the other", s3


def test_changes_that_are_forgotten_are_pulled_from_the_address(address: Url, tmp_path: Path) -> None:
    mirror = Mirror(address, tmp_path / "copy")
    write(mirror.folder, a="1", b="2")
    mirror.push("tables/*")
    write(mirror.folder, a="3", c="4")
    assert mirror.delete_unpushed("tables/*") == ["tables/a", "tables/c"]
    assert mirror.push("tables/*") == []
    assert mirror.pull("tables/*") == ["tables/a"]
    assert texts(mirror.folder) == {"a": "1", "b": "2"}


def test_a_push_finds_the_files_of_all_its_patterns(address: Url, tmp_path: Path) -> None:
    mirror = Mirror(address, tmp_path / "copy")
    for name in ("fingerprints.json", "runs/a/run.json", "runs/a/logs/x", "runs/b/run.json", "tables/t"):
        write_text(mirror.folder / name, name)
    patterns = ("runs/a/*", "runs/a/logs/*", "!runs/a/logs/*", "fingerprints.json", "missing.json")
    assert mirror.push(*patterns) == ["fingerprints.json", "runs/a/run.json"]
    assert mirror.push("runs/*/run.json") == ["runs/b/run.json"]
    assert mirror.push("*") == ["runs/a/logs/x", "tables/t"]


def test_names_that_lead_out_of_the_working_copy_are_not_pulled(tmp_path: Path) -> None:
    files = fsspec.filesystem("memory")
    for name in ("../escaped", ".mirror.json", "tables/../../escaped", "tables/a"):
        files.pipe_file("/hostile/x", b"x")
        files.store[f"/hostile/out/{name}"] = files.store["/hostile/x"]
    pulled = Mirror(Url("memory://hostile/out"), tmp_path / "copy").pull("*")
    assert pulled == ["tables/a"]
    assert not (tmp_path / "escaped").exists()


def test_a_local_folder_needs_no_requests(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path, tmp_path)
    write(tmp_path, a="1")
    assert (mirror.pull("*"), mirror.push("*"), mirror.names("*")) == ([], [], [])
    mirror.remove("tables/a")
    assert texts(tmp_path) == {"a": "1"}


def test_a_store_that_stays_away_ends_with_what_where_and_fix_and_loses_nothing(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "RETRY_S", 0.5)
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("away")
    mirror = Mirror(Url("s3://away/flowers"), tmp_path / "copy")
    write(mirror.folder, a="1")
    with monkeypatch.context() as closed:
        closed.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
        with pytest.raises(StoreError, match="cannot be written") as caught:
            Mirror(mirror.address, mirror.folder).push("*")
    assert caught.value.where == "s3://away/flowers/tables/a"
    assert str(mirror.folder) in caught.value.fix
    assert mirror.push("*") == ["tables/a"], s3


def test_a_full_local_disk_is_not_an_error_of_the_address(tmp_path: Path) -> None:
    script = f"""
import fsspec
from pathlib import Path
from pipeline.storage.addresses import Url
from pipeline.storage.mirror import Mirror
fsspec.filesystem("memory").pipe_file("/bucket/out/lora/weights", b"x" * 200_000)
try:
    Mirror(Url("memory://bucket/out"), Path({str(tmp_path)!r})).pull("*")
except OSError as err:
    print(err)
"""
    command = on_small_disk(str(tmp_path), "64k", [sys.executable, "-c", script])
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == f"[Errno 28] No space left on device: '{tmp_path}/lora/weights'\n"


def test_only_the_error_of_an_upload_says_that_the_next_command_uploads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = Mirror(Url(f"memory://{uuid.uuid4().hex}/out"), tmp_path / "copy")
    write(mirror.folder, a="1")
    mirror.push("*")
    write(mirror.folder, a="2")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("403")

    fixes: dict[str, str] = {}
    for name, work in {
        "upload": lambda: mirror.push("*"),
        "list_files": lambda: mirror.pull("*"),
        "remove": lambda: mirror.remove("tables/a"),
    }.items():
        with monkeypatch.context() as patched:
            patched.setattr(mirror.remote, name, refuse)
            with pytest.raises(StoreError) as caught:
                work()
        fixes[name] = caught.value.fix
    uploads = "the next command for this recipe on this machine uploads them"
    assert {name for name, fix in fixes.items() if uploads in fix} == {"upload"}
    assert all(
        fix.endswith("then start the command again") for name, fix in fixes.items() if name != "upload"
    )


class RefusesFolder(MemoryFileSystem):
    """A file system in memory that refuses to list one folder."""

    protocol = "refuses-folder"
    refused = "/reports"

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        if path.rstrip("/").endswith(self.refused):
            raise PermissionError(13, "no access", path)
        return super().ls(path, detail, **options)


def test_files_of_a_folder_that_cannot_be_listed_are_not_taken_for_deleted_ones(tmp_path: Path) -> None:
    fsspec.register_implementation("refuses-folder", RefusesFolder, clobber=True)
    address = Url(f"refuses-folder://{uuid.uuid4().hex}/flowers")
    mirror = Mirror(address, tmp_path / "copy")
    file = mirror.folder / "reports" / "a"
    write_text(file, "1")
    RefusesFolder.refused = "/nothing"
    assert mirror.push("reports/*") == ["reports/a"]

    RefusesFolder.refused = "/reports"
    with pytest.raises(StoreError, match="no access"):
        mirror.pull("reports/*")
    assert file.read_text("utf-8") == "1"
