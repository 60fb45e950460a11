"""Publishing to `lora/` by two processes, on one machine or on two."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from pipeline.errors import TrainingError
from pipeline.storage import lease as leases
from pipeline.storage.addresses import Url
from pipeline.storage.atomic import write_text
from pipeline.storage.mirror import Mirror
from pipeline.trained_lora.publishing import publishing

NAMES = ("pytorch_lora_weights.safetensors", "demo_kohya.safetensors", "samples.parquet", "provenance.json")


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_POLL_S", 0.02)


@pytest.fixture
def address() -> Url:
    return Url(f"memory://{uuid.uuid4().hex}/out")


def publish(mirror: Mirror, run: str, samples: str) -> None:
    for name in NAMES:
        write_text(mirror.folder / "lora" / name, samples if name == "samples.parquet" else run)


def published(mirror: Mirror) -> dict[str, str]:
    return {Path(name).name: mirror.remote.read(name).decode() for name in mirror.names("lora/*")}


def expected(run: str, samples: str) -> dict[str, str]:
    return {name: samples if name == "samples.parquet" else run for name in NAMES}


def test_a_lora_replaces_all_files_of_one_that_another_machine_published_in_between(
    address: Url, tmp_path: Path
) -> None:
    one, two = Mirror(address, tmp_path / "one"), Mirror(address, tmp_path / "two")
    with publishing(one, print):
        publish(one, "first", samples="equal")
    two.pull("lora/*")
    with publishing(one, print):
        publish(one, "second", samples="other")
    with publishing(two, print):
        publish(two, "third", samples="equal")
    assert published(one) == expected("third", "equal")
    assert one.names("runs/*") == []


def test_two_machines_that_publish_at_once_do_so_one_after_the_other(address: Url, tmp_path: Path) -> None:
    one, two, lines = Mirror(address, tmp_path / "one"), Mirror(address, tmp_path / "two"), list[str]()
    is_waiting = threading.Event()

    def log(line: str) -> None:
        lines.append(line)
        is_waiting.set()

    def publish_second() -> None:
        with publishing(two, log):
            lines.append(f"finds {sorted(set(published(two).values()))}")
            publish(two, "of two", samples="equal")

    second = threading.Thread(target=publish_second)
    with publishing(one, print):
        second.start()
        publish(one, "of one", samples="equal")
        assert is_waiting.wait(60)
        assert published(one) == {}
    second.join(60)
    assert "is publishing a LoRA; waiting until it finishes or stops" in lines[0]
    assert lines[1:] == ["finds ['equal', 'of one']"]
    assert published(one) == expected("of two", "equal")


def test_a_machine_that_lost_the_lease_publishes_nothing(address: Url, tmp_path: Path) -> None:
    mirror = Mirror(address, tmp_path)
    mirror.remote.put("lora/provenance.json", b"of the other")

    def lose() -> None:
        with publishing(mirror, print):
            publish(mirror, "of this machine", samples="equal")
            mirror.remote.put("runs/publish.lease", b'{"machine": "two", "copy": "two", "token": "two"}')

    with pytest.raises(TrainingError, match="another machine publishes a LoRA") as caught:
        lose()
    assert caught.value.where == f"{address}/runs/publish.lease"
    assert published(mirror) == {"provenance.json": "of the other"}


def test_only_one_process_at_a_time_publishes_in_a_local_folder(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / ".publish.lock", fallback_to_soft=False)
    with publishing(Mirror(tmp_path, tmp_path), print), pytest.raises(Timeout):
        lock.acquire(blocking=False)
    lock.acquire(blocking=False)
    lock.release()
