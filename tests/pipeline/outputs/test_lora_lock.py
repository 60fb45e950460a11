"""Replacing `lora/` by two processes, on one machine or on two."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from pipeline.errors import TrainingError
from pipeline.outputs import lease as leases
from pipeline.outputs.folder import OutputFolder
from pipeline.outputs.lora_lock import hold_lora
from pipeline.storage.addresses import Url
from pipeline.storage.atomic import write_text
from pipeline.storage.remote_folder import RemoteFolder

NAMES = ("pytorch_lora_weights.safetensors", "demo_kohya.safetensors", "samples.parquet", "provenance.json")


@pytest.fixture
def address() -> Url:
    return Url(f"memory://{uuid.uuid4().hex}/out")


def write_lora(outputs: OutputFolder, run: str) -> None:
    for name in NAMES:
        write_text(outputs.folder / "lora" / name, run)


def published(address: Url) -> dict[str, str]:
    remote = RemoteFolder(address)
    return {Path(name).name: remote.read(name).decode() for name in remote.list_files("lora")}


def test_a_lora_replaces_all_files_of_one_that_another_machine_published_in_between(
    address: Url, tmp_path: Path
) -> None:
    one, two = OutputFolder(address, tmp_path / "one"), OutputFolder(address, tmp_path / "two")
    with hold_lora(one, print):
        write_lora(one, "first")
        write_text(one.folder / "lora/samples.jpg", "previews")
    with hold_lora(two, print):
        write_lora(two, "second")
    assert published(address) == dict.fromkeys(NAMES, "second")
    with hold_lora(one, print):
        write_lora(one, "first")
    assert published(address) == {**dict.fromkeys(NAMES, "first"), "samples.jpg": "previews"}
    assert RemoteFolder(address).list_files("runs") == {}


class Uploads(OutputFolder):
    """An output folder that counts what it uploads."""

    def __init__(self, address: Url, folder: Path) -> None:
        super().__init__(address, folder)
        self.uploaded: list[str] = []

    def upload(self, *names: str, **options: object) -> None:
        self.uploaded += names
        super().upload(*names, **options)  # pyright: ignore[reportArgumentType] - a guard


def test_a_lora_that_is_published_already_is_not_uploaded_again(address: Url, tmp_path: Path) -> None:
    outputs = Uploads(address, tmp_path)
    with hold_lora(outputs, print):
        write_lora(outputs, "first")
    assert len(outputs.uploaded) == len(NAMES)
    with hold_lora(outputs, print):
        write_lora(outputs, "first")
    assert len(outputs.uploaded) == len(NAMES)


def test_an_export_that_another_machine_undid_does_not_come_back(address: Url, tmp_path: Path) -> None:
    one, two = OutputFolder(address, tmp_path / "one"), OutputFolder(address, tmp_path / "two")
    record = "runs/exported_step.json"
    with hold_lora(one, print):
        write_text(one.folder / record, "{}")
    with hold_lora(two, print):
        (two.folder / record).unlink()
    with hold_lora(one, print):
        assert not (one.folder / record).exists()
    assert RemoteFolder(address).list_files() == {}


def test_two_machines_that_publish_at_once_do_so_one_after_the_other(
    address: Url, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_POLL_S", 0.02)
    one, two = OutputFolder(address, tmp_path / "one"), OutputFolder(address, tmp_path / "two")
    lines: list[str] = []
    is_waiting = threading.Event()

    def log(line: str) -> None:
        lines.append(line)
        is_waiting.set()

    def publish_second() -> None:
        with hold_lora(two, log):
            lines.append(f"finds {sorted(set(published(address).values()))}")
            write_lora(two, "of two")

    second = threading.Thread(target=publish_second)
    with hold_lora(one, print):
        second.start()
        write_lora(one, "of one")
        assert is_waiting.wait(60)
        assert published(address) == {}
    second.join(60)
    assert "is replacing lora/; waiting until it finishes or stops" in lines[0]
    assert lines[1:] == ["finds ['of one']"]
    assert published(address) == dict.fromkeys(NAMES, "of two")


def test_a_machine_that_lost_the_lease_publishes_nothing(address: Url, tmp_path: Path) -> None:
    outputs, remote = OutputFolder(address, tmp_path), RemoteFolder(address)
    remote.put("lora/provenance.json", b"of the other")

    def lose() -> None:
        with hold_lora(outputs, print):
            write_lora(outputs, "of this machine")
            remote.put("runs/publish.lease", b'{"machine": "two", "owner": "two", "token": "two"}')

    with pytest.raises(TrainingError, match="another machine replaces lora/") as caught:
        lose()
    assert caught.value.where == f"{address}/runs/publish.lease"
    assert published(address) == {"provenance.json": "of the other"}


def test_only_one_process_at_a_time_publishes_in_a_local_folder(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / ".publish.lock", fallback_to_soft=False)
    with hold_lora(OutputFolder(tmp_path, tmp_path), print), pytest.raises(Timeout):
        lock.acquire(blocking=False)
    lock.acquire(blocking=False)
    lock.release()
