"""Files that a machine fetches from an address and uploads to it."""

from __future__ import annotations

import errno
import uuid
from pathlib import Path

import pytest

from pipeline.errors import StoreError
from pipeline.outputs.folder import OutputFolder
from pipeline.storage import retry
from pipeline.storage.addresses import Url
from pipeline.storage.atomic import write_text
from pipeline.storage.remote_folder import RemoteFolder


@pytest.fixture
def address() -> Url:
    return Url(f"memory://{uuid.uuid4().hex}/out")


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in files}


def remote_contents(address: Url) -> dict[str, str]:
    remote = RemoteFolder(address)
    return {name: remote.read(name).decode() for name in remote.list_files()}


def test_a_fetch_makes_named_files_equal_to_the_address_and_leaves_all_other_files(
    address: Url, tmp_path: Path
) -> None:
    outputs, remote = OutputFolder(address, tmp_path), RemoteFolder(address)
    for name in ("tables/a.parquet", "tables/known/b.parquet", "reports/a.json"):
        remote.put(name, b"remote")
    for name in ("tables/a.parquet", "tables/old.parquet", "tables/known/old.parquet", "reports/old.json"):
        write_text(tmp_path / name, "local")
    assert outputs.fetch("tables/known/", "tables/a.parquet", "reports/none.json") == [
        "tables/known/b.parquet",
        "tables/a.parquet",
    ]
    assert contents(tmp_path) == {
        "tables/a.parquet": "remote",
        "tables/known/b.parquet": "remote",
        "tables/old.parquet": "local",
        "reports/old.json": "local",
    }
    assert set(remote_contents(address).values()) == {"remote"}


def test_hidden_files_and_names_that_lead_out_of_the_folder_are_not_transferred(
    address: Url, tmp_path: Path
) -> None:
    outputs, remote = OutputFolder(address, tmp_path / "copy"), RemoteFolder(address)
    remote.put("reports/.hidden/a", b"x")
    remote.put("reports/../../evil", b"x")
    assert outputs.fetch("reports/") == []
    write_text(tmp_path / "copy/reports/.a.tmp", "x")
    outputs.upload("reports/")
    assert sorted(remote_contents(address)) == ["reports/../../evil", "reports/.hidden/a"]


class Recorded(RemoteFolder):
    """A folder that notes its changes, and may fail at one of them."""

    def __init__(self, url: Url, fails_at: str = "") -> None:
        super().__init__(url)
        self.changes: list[str] = []
        self._fails_at = fails_at

    def upload(self, path: Path, name: str, *, create: bool = False) -> str:
        if self._fails_at and name.endswith(self._fails_at):
            raise OSError("the service does not answer")
        self.changes.append(f"put {Path(name).name}")
        return super().upload(path, name, create=create)

    def remove(self, name: str) -> None:
        self.changes.append(f"delete {Path(name).name}")
        super().remove(name)


def recorded(address: Url, folder: Path, fails_at: str = "") -> tuple[OutputFolder, Recorded]:
    outputs, remote = OutputFolder(address, folder), Recorded(address, fails_at)
    outputs.remote = remote  # pyright: ignore[reportAttributeAccessIssue] - a cached property
    return outputs, remote


def write_checkpoint(folder: Path, text: str) -> None:
    for name in ("COMPLETE", "adapter.safetensors", "lora.json", "optimizer.pt"):
        write_text(folder / "checkpoint" / name, text)


def test_markers_are_deleted_first_and_uploaded_last(address: Url, tmp_path: Path) -> None:
    outputs, remote = recorded(address, tmp_path)
    write_checkpoint(tmp_path, "first")
    outputs.upload("checkpoint/")
    remote.changes.clear()
    write_checkpoint(tmp_path, "second")
    outputs.upload("checkpoint/")
    assert remote.changes[:2] == ["delete COMPLETE", "delete lora.json"]
    assert sorted(remote.changes[2:4]) == ["put adapter.safetensors", "put optimizer.pt"]
    assert remote.changes[4:] == ["put lora.json", "put COMPLETE"]
    assert set(remote_contents(address).values()) == {"second"}


def test_an_interrupted_upload_leaves_no_marker(address: Url, tmp_path: Path) -> None:
    outputs, _ = recorded(address, tmp_path)
    write_checkpoint(tmp_path, "first")
    outputs.upload("checkpoint/")
    write_checkpoint(tmp_path, "second")
    failing, _ = recorded(address, tmp_path, fails_at="optimizer.pt")
    with pytest.raises(StoreError, match="cannot be written"):
        failing.upload("checkpoint/")
    assert {"checkpoint/COMPLETE", "checkpoint/lora.json"}.isdisjoint(remote_contents(address))


def test_a_guard_is_called_before_each_change_and_ends_an_upload(address: Url, tmp_path: Path) -> None:
    outputs, remote = recorded(address, tmp_path)
    write_checkpoint(tmp_path, "first")
    calls: list[int] = []

    def guard() -> None:
        calls.append(len(remote.changes))
        if len(calls) == 6:
            raise KeyError

    with pytest.raises(KeyError):
        outputs.upload("checkpoint/", guard=guard)
    assert len(remote.changes) == 5
    assert "checkpoint/COMPLETE" not in remote_contents(address)


def test_a_guarded_upload_does_not_replace_a_file_that_appeared_meanwhile(s3: str, tmp_path: Path) -> None:
    import fsspec

    bucket = f"bucket-{uuid.uuid4().hex[:8]}"
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
    address = Url(f"s3://{bucket}/out")
    write_text(tmp_path / "file", "of this machine")
    calls: list[int] = []

    def guard() -> None:
        calls.append(1)
        if len(calls) == 1:
            RemoteFolder(address).put("file", b"of the other")
        else:
            raise KeyError

    with pytest.raises(KeyError):
        OutputFolder(address, tmp_path).upload("file", guard=guard)
    assert remote_contents(address) == {"file": "of the other"}, s3


def test_a_replaced_folder_has_exactly_the_local_files(address: Url, tmp_path: Path) -> None:
    outputs, remote = OutputFolder(address, tmp_path), RemoteFolder(address)
    for name in ("reports/a/1.jpg", "reports/a/old.jpg", "reports/b/other.jpg"):
        remote.put(name, b"before")
    write_text(tmp_path / "reports/a/1.jpg", "now")
    write_text(tmp_path / "reports/a/2.jpg", "now")
    outputs.replace_folder("reports/a/")
    assert remote_contents(address) == {
        "reports/a/1.jpg": "now",
        "reports/a/2.jpg": "now",
        "reports/b/other.jpg": "before",
    }


def test_a_replaced_folder_uploads_only_files_with_other_content(s3: str, tmp_path: Path) -> None:
    import fsspec

    bucket = f"bucket-{uuid.uuid4().hex[:8]}"
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
    outputs, remote = recorded(Url(f"s3://{bucket}/out"), tmp_path)
    for number in range(3):
        write_text(tmp_path / f"reports/{number}.jpg", "same")
    outputs.replace_folder("reports/")
    remote.changes.clear()
    write_text(tmp_path / "reports/1.jpg", "more")
    outputs.replace_folder("reports/")
    assert remote.changes == ["put 1.jpg"], s3

    # Another machine downloads only what it does not have.
    other, downloads = OutputFolder(outputs.address, tmp_path / "other"), list[str]()
    write_text(tmp_path / "other/reports/1.jpg", "more")
    download = other.remote.download
    other.remote.download = lambda name, path: (downloads.append(name), download(name, path))[1]  # type: ignore[method-assign]
    assert len(other.fetch("reports/")) == 3
    assert sorted(downloads) == ["reports/0.jpg", "reports/2.jpg"]


def test_a_local_folder_needs_no_requests(tmp_path: Path) -> None:
    outputs = OutputFolder(tmp_path, tmp_path)
    write_text(tmp_path / "tables/a.parquet", "x")
    outputs.upload("tables/")
    outputs.replace_folder("tables/")
    outputs.remove("tables/a.parquet")
    assert outputs.fetch("tables/a.parquet", "tables/") == outputs.names() == []
    assert contents(tmp_path) == {"tables/a.parquet": "x"}


def test_a_service_that_stays_away_ends_with_what_where_and_fix(
    address: Url, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "RETRY_S", 0.0)
    write_text(tmp_path / "file", "x")
    outputs, _ = recorded(address, tmp_path, fails_at="file")
    with pytest.raises(StoreError, match="cannot be written: the service does not answer") as caught:
        outputs.upload("file")
    assert caught.value.where == f"{address}/file"
    assert "start the command again" in caught.value.fix


def test_a_full_local_disk_is_not_an_error_of_the_address(address: Url, tmp_path: Path) -> None:
    outputs, remote = recorded(address, tmp_path)
    remote.put("file", b"x")

    def fail(_name: str, _path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    remote.download = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="No space left") as caught:
        outputs.fetch("file")
    assert caught.value.filename == str(tmp_path / "file")
    assert not list(tmp_path.rglob(".*.tmp"))
