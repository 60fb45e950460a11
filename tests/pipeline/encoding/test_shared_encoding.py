"""The files of an encoding at an address: parts of jobs and results, and attempts at one shard."""

from __future__ import annotations

import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest

from pipeline.cache.store import EntrySpec, TensorSpec
from pipeline.encoding.collecting import Collector
from pipeline.encoding.jobs import (
    Encoding,
    Failure,
    Job,
    ResultsWriter,
    read_encoding,
    read_results,
    write_encoding,
)
from pipeline.encoding.shard import is_finished
from pipeline.encoding.shared_encoding import (
    ENCODINGS,
    ResultsUpload,
    Shard,
    SharedEncoding,
    publish_encoding,
)
from pipeline.errors import StoreError
from pipeline.maintenance.gc import survey
from pipeline.storage.addresses import Url
from tests.pipeline.encoding.forged import forged


def job(number: int) -> Job:
    spec = EntrySpec("latents", f"{number:064x}", {"latent": TensorSpec("float16", (4, 8, 8))})
    return Job(spec, {"inputs": {"n": number}}, {"path": f"{number}.png"}, f"photos/{number}", number + 1)


@pytest.fixture
def encoding(tmp_path: Path) -> Encoding:
    return Encoding("latents", tmp_path, tmp_path / "cache", {}, [job(number) for number in range(500)])


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PART_BYTES", "JOBS_PART_BYTES"):
        monkeypatch.setattr(f"pipeline.encoding.shared_encoding.{name}", 1000)


@pytest.mark.usefixtures("small_parts")
def test_jobs_travel_in_parts_and_arrive_in_order(encoding: Encoding, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    shared = publish_encoding(write_encoding(encoding, tmp_path / "here"), num_shards=3, cpu_threads=2)
    assert len([file.name for file in shared.files() if file.name.startswith("jobs-")]) > 10
    file, settings = SharedEncoding(shared.address).fetch(tmp_path / "there")
    assert list(read_encoding(file).jobs) == list(encoding.jobs)
    assert (settings["num_shards"], settings["cpu_threads"]) == (3, 2)
    shared.remove()
    assert shared.files() == []


@pytest.mark.usefixtures("small_parts")
def test_results_grow_in_parts_and_several_attempts_are_one_result(tmp_path: Path) -> None:
    shared, collected = SharedEncoding(tmp_path / "encoding"), tmp_path / "collected"
    collected.mkdir()
    collector = Collector(shared, collected)
    for attempt, outcome in enumerate(("made", "present")):
        local = tmp_path / f"attempt-{attempt}"
        local.mkdir()
        upload = ResultsUpload(shared, Shard(1, 2), local / "results-0.jsonl")
        upload.push()  # nothing is written yet
        with ResultsWriter(local / "encoding.json", 0) as results:
            for number in range(0 if attempt else 20, 60):
                results.ended(f"{number:064x}", outcome)
                upload.push()
                assert not collector.has_finished(Shard(1, 2))
            results.ended("f" * 64, Failure("undecodable", "a detail", "a fix"))
            results.finish(1.0)
        upload.push()
        collector.poll()
        assert collector.has_finished(Shard(1, 2))
        uploaded = sorted(file.name for file in shared.files() if upload.attempt in file.name)
        assert len(uploaded) > 4
        assert b"".join(map(shared.read, uploaded)) == (local / "results-0.jsonl").read_bytes()
        collector = Collector(shared, collected)

    results = read_results(collected)
    assert results.made == {f"{number:064x}" for number in range(20, 60)}
    assert results.present == {f"{number:064x}" for number in range(20)}
    assert results.failed.keys() == {"f" * 64}


def test_a_failed_copy_is_repeated_and_a_half_written_line_waits(tmp_path: Path) -> None:
    local = tmp_path / "results-0.jsonl"
    folder = tmp_path / "encoding"
    upload = ResultsUpload(SharedEncoding(folder), Shard(0, 1), local)
    local.write_text('{"key": "a", "outcome": "made"}\n{"key": "b"')
    folder.write_text("a file in place of the folder")
    with pytest.raises(StoreError, match="cannot be written"):
        upload.push()
    folder.unlink()
    upload.push()
    (name,) = [path.name for path in folder.iterdir()]
    assert json.loads((folder / name).read_text()) == {"key": "a", "outcome": "made"}


def test_progress_counts_a_job_once_and_ignores_a_missing_order(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("pipeline.encoding.collecting.POLL_INTERVAL_S", 0.0)
    (tmp_path / "collected").mkdir()
    collector = Collector(SharedEncoding(tmp_path / "encoding"), tmp_path / "collected")
    assert collector.poll_sometimes() == 0
    for attempt in range(2):
        local = tmp_path / f"results-{attempt}.jsonl"
        local.write_text('{"key": "a", "outcome": "made", "failure": null}\n')
        ResultsUpload(SharedEncoding(tmp_path / "encoding"), Shard(0, 1), local).push()
    assert collector.poll_sometimes() == 1


def test_L13_gc_keeps_an_order_while_its_step_waits_for_workers(
    encoding: Encoding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm may keep the job of an encoding pending for days; no worker writes a file before it starts."""
    monkeypatch.setattr("pipeline.encoding.collecting.POLL_INTERVAL_S", 0.0)
    (tmp_path / "here").mkdir()
    shared = publish_encoding(write_encoding(encoding, tmp_path / "here"), num_shards=3, cpu_threads=2)
    num_files = len(shared.files())
    collector = Collector(shared, tmp_path / "here")
    for file in shared.files():
        os.utime(tmp_path / "cache" / ENCODINGS / shared.encoding_id / file.name, (1e9, 1e9))
    collector.poll_sometimes()
    assert survey(tmp_path / "cache").num_old_encodings == 1, "the encoding is renewed once an hour"

    monotonic = time.monotonic
    monkeypatch.setattr("pipeline.encoding.collecting.time.monotonic", lambda: monotonic() + 3600)
    collector.poll_sometimes()
    surveyed = survey(tmp_path / "cache")
    assert (surveyed.num_young_encodings, surveyed.old_encodings) == (1, {})

    # Neither workers nor the collector use the new file.
    (tmp_path / "there").mkdir()
    file, _ = SharedEncoding(shared.address).fetch(tmp_path / "there")
    assert list(read_encoding(file).jobs) == list(encoding.jobs)
    assert not is_finished(shared, Shard(0, 3))
    assert collector.poll_sometimes() == 0
    assert len(shared.files()) == num_files + 1
    shared.remove()
    assert shared.files() == []


def test_a_failed_renewal_of_an_order_is_repeated_after_the_next_poll(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.encoding.collecting.POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr("pipeline.encoding.collecting.RENEWAL_INTERVAL_S", 0.0, raising=False)
    folder = tmp_path / "encoding"
    folder.write_text("a file in place of the folder")
    collector = Collector(SharedEncoding(folder), tmp_path)
    assert collector.poll_sometimes() == 0
    folder.unlink()
    assert collector.poll_sometimes() == 0
    assert [path.name for path in folder.iterdir()] == ["waiting.txt"]


NESTED = b"[" * 100_000


@pytest.mark.parametrize(
    "content",
    [NESTED, b"[]", b"7", b'{"versions"', b"\xff", b'{"versions": {}, "encoding": 1}'],
)
def test_a_settings_file_that_latentline_did_not_write_is_an_error(tmp_path: Path, content: bytes) -> None:
    shared = forged(SharedEncoding(tmp_path / "cache" / ENCODINGS / "x"), "encoding.json", content)
    with pytest.raises(StoreError, match=r"damaged|another version"):
        shared.fetch(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("results-0-of-2-ab-00000.jsonl", NESTED),
        ("results-0-of-2-ab-00000.jsonl", b'{"key": {}, "outcome": "made"}\n'),
        ("results-0-of-2-ab-00000.jsonl", b'{"key": "a", "outcome": "failed", "failure": {"x": 1}}\n'),
        ("results-0-of-2-ab-00000.jsonl", b'{"work_s": "a", "aside_s": 0}\n'),
        ("results-0-of-2-ab-00000.jsonl", b'{"work_s": 1e999, "aside_s": 0}\n'),
        ("results-0-of-2-ab-00000.jsonl", b'{"work_s": 0, "aside_s": 1' + b"0" * 400 + b"}\n"),
        ("results-0-of-2-ab-00000.jsonl", b'{"work_s": NaN, "aside_s": 0}\n'),
        ("results-0-of-2-ab-00000.jsonl", b'{"work_s": 0, "aside_s": -1}\n'),
        ("results-0-of-2-ab-00000.jsonl", b'{"key": "a", "outcome": "lost"}\n'),
        ("results-0-of-2-ab-00000.jsonl", b'{"key": 7, "outcome": "made"}\n'),
        (
            "results-0-of-2-ab-00000.jsonl",
            b'{"key": "a", "outcome": "failed", "failure": {"reason": 1, "detail": [], "fix": {}}}\n',
        ),
        ("error-0-of-2-ab.json", NESTED),
        ("error-0-of-2-ab.json", b'{"kind": "counted", "what": "a", "where": "b", "fix": "c"}'),
        ("error-0-of-2-ab.json", b'{"kind": "StoreError"}'),
    ],
)
def test_results_that_latentline_did_not_write_are_an_error(
    tmp_path: Path, name: str, content: bytes
) -> None:
    shared = SharedEncoding(tmp_path / "cache" / ENCODINGS / "x")
    shared.put(name, content)
    with pytest.raises(StoreError, match="a file of the encoding is damaged"):
        Collector(shared, tmp_path).poll()


@pytest.mark.parametrize("separator", ["\u0085", "\u2028", "\u2029"])
def test_results_with_separators_inside_of_a_text_are_read_as_they_were_counted(
    tmp_path: Path, separator: str
) -> None:
    shared, folder = SharedEncoding(tmp_path / "cache" / ENCODINGS / "x"), tmp_path / "collected"
    folder.mkdir()
    failure = {"reason": "r", "detail": f"d{separator}d", "fix": "f"}
    line = json.dumps({"key": "a", "outcome": "failed", "failure": failure}, ensure_ascii=False)
    shared.put("results-0-of-1-ab-00000.jsonl", f"{line}\n".encode())
    Collector(shared, folder).poll()
    assert read_results(folder).failed == {"a": Failure("r", f"d{separator}d", "f")}


def test_entries_go_to_the_cache_of_the_encoding_whatever_it_contains(
    encoding: Encoding, tmp_path: Path
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    shared = publish_encoding(write_encoding(encoding, tmp_path / "here"), num_shards=1, cpu_threads=1)
    settings = json.loads(shared.read("encoding.json"))
    settings["encoding"]["store_root"] = "http://169.254.169.254/latest"
    file, _ = forged(shared, "encoding.json", json.dumps(settings).encode()).fetch(tmp_path / "there")
    assert read_encoding(file).store_root == encoding.store_root


def test_pictures_are_written_into_their_folder_only(tmp_path: Path, s3: str) -> None:
    del s3
    files, bucket = fsspec.filesystem("s3", skip_instance_cache=True), uuid.uuid4().hex
    files.mkdir(bucket)
    shared = SharedEncoding(Url(f"s3://{bucket}/{ENCODINGS}/x"))
    shared.put("pictures/a.jpg", b"picture")
    for name in ("pictures/../../evil.txt", "pictures/sub/evil.txt", "pictures/.evil", "pictures/..evil"):
        files.pipe_file(f"{bucket}/{ENCODINGS}/x/{name}", b"evil")
    folder = tmp_path / "reports" / "vae_latents"
    folder.mkdir(parents=True)
    Collector(shared, tmp_path).fetch_pictures(folder)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a.jpg"]
