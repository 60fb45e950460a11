"""Tables, reports and rejected rows of stages that run on different machines."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import fsspec
import polars as pl
import pytest

from pipeline.errors import DatasetError, GateClosedError, StoreError
from pipeline.outputs.folder import OutputFolder
from pipeline.outputs.stage_files import (
    REPLACED_CAPTIONS,
    fetch_for_command,
    fetch_stage,
    stage_files,
    upload_stage,
)
from pipeline.storage.addresses import Url
from pipeline.storage.atomic import write_text
from pipeline.storage.remote_folder import RemoteFolder
from pipeline.storage.tables import Tables, empty


@pytest.fixture
def address() -> Url:
    return Url(f"memory://{uuid.uuid4().hex}/out")


def rejected(stage: str, number: int) -> pl.DataFrame:
    columns = {"dataset": "photos", "stage": stage, "reason": "r", "detail": "d", "fix": "f"}
    rows = [{"sample_id": f"photos/{stage}{n}", "path": f"{stage}{n}", **columns} for n in range(number)]
    return pl.DataFrame(rows, schema=empty("rejected").schema)


def merged(address: Url, folder: Path) -> list[str]:
    OutputFolder(address, folder).fetch("tables/rejected.parquet")
    return sorted(Tables(folder).read("rejected")["sample_id"])


class Interrupted(OutputFolder):
    """An output folder in which another machine works before the merged table is uploaded."""

    def __init__(self, address: Url, folder: Path, other: Callable[[], object]) -> None:
        super().__init__(address, folder)
        self._others = [other]

    def upload(self, *names: str, **options: object) -> None:
        if names == ("tables/rejected.parquet",) and self._others:
            self._others.pop()()
        super().upload(*names, **options)  # pyright: ignore[reportArgumentType] - a guard


def test_rows_that_arrive_between_merge_and_upload_are_merged_too(address: Url, tmp_path: Path) -> None:
    text = OutputFolder(address, tmp_path / "text")
    Tables(text.folder).write_rejected("text_embeddings", rejected("text_embeddings", 2))
    latents = Interrupted(address, tmp_path / "latents", lambda: upload_stage(text, "text_embeddings"))
    Tables(latents.folder).write_rejected("vae_latents", rejected("vae_latents", 3))
    upload_stage(latents, "vae_latents")
    assert len(merged(address, tmp_path / "third")) == 5


def test_a_stage_replaces_its_own_rows_and_keeps_the_rows_of_other_stages(
    address: Url, tmp_path: Path
) -> None:
    for stage, number in (("raw_images", 2), ("vae_latents", 3), ("raw_images", 1)):
        outputs = OutputFolder(address, tmp_path / f"{stage}{number}")
        fetch_stage(outputs, stage, checks_only=False)
        Tables(outputs.folder).write_rejected(stage, rejected(stage, number))
        upload_stage(outputs, stage)
    names = ["photos/raw_images0", *(f"photos/vae_latents{n}" for n in range(3))]
    assert merged(address, tmp_path / "third") == names


def test_a_stage_fetches_what_it_reads_besides_its_inputs(address: Url, tmp_path: Path) -> None:
    remote = RemoteFolder(address)
    for asset in ("raw_images", "validated_dataset", "aspect_buckets", "vae_latents"):
        remote.put(f"tables/{asset}.parquet", b"x")
        remote.put(f"reports/{asset}.json", b"x")
        remote.put(f"reports/{asset}/picture.jpg", b"x")
    remote.put("tables/known/pixels.parquet", b"x")
    remote.put("tables/rejected/raw_images.parquet", b"x")
    write_text(tmp_path / "tables/validated_dataset.parquet", "of an earlier run")
    remote.remove("tables/validated_dataset.parquet")

    fetch_stage(OutputFolder(address, tmp_path), "validated_dataset", checks_only=False)
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {
        "reports/raw_images.json",
        "reports/validated_dataset.json",
        "reports/validated_dataset/picture.jpg",
        "tables/known/pixels.parquet",
        "tables/rejected/raw_images.parquet",
    }


def test_the_checks_of_a_training_fetch_the_published_lora_and_the_logs_of_its_run(
    address: Url, tmp_path: Path
) -> None:
    remote = RemoteFolder(address)
    files = {
        "lora/provenance.json": b'{"run": "a"}',
        "lora/weights.safetensors": b"x",
        "runs/a/finished.json": b"{}",
        "runs/a/logs/metrics.jsonl": b"{}",
        "runs/a/checkpoints/step-00000001/optimizer.pt": b"x",
        "runs/b/logs/metrics.jsonl": b"{}",
    }
    for name, data in files.items():
        remote.put(name, data)
    fetch_stage(OutputFolder(address, tmp_path), "trained_lora", checks_only=True)
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == set(list(files)[:4])
    fetch_stage(OutputFolder(address, tmp_path / "stage"), "trained_lora", checks_only=False)
    assert not [path for path in (tmp_path / "stage").rglob("*") if path.is_file()]


def test_a_command_fetches_tables_reports_and_records_only(address: Url, tmp_path: Path) -> None:
    remote = RemoteFolder(address)
    wanted = {
        "tables/raw_images.parquet",
        "tables/known/pixels.parquet",
        "reports/raw_images.json",
        "lora/provenance.json",
        "runs/exported_step.json",
        "runs/a/run.json",
        "runs/a/checkpoints/step-00000001/lora.json",
    }
    others = {"lora/weights.safetensors", "reports/raw_images/picture.jpg", "runs/a/samples/1.jpg"}
    for name in wanted | others:
        remote.put(name, b"{}")
    fetch_for_command(OutputFolder(address, tmp_path))
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()} == wanted


@pytest.fixture
def outputs(address: Url, tmp_path: Path) -> OutputFolder:
    return OutputFolder(address, tmp_path)


def names_at(outputs: OutputFolder) -> list[str]:
    return sorted(RemoteFolder(Url(str(outputs.address))).list_files())


def run_step(
    outputs: OutputFolder,
    error: Exception | None = None,
    *,
    blocked: bool = False,
    picture: str = "picture.jpg",
) -> None:
    """Write a report, results of checks and a picture, then raise `error`."""
    with stage_files(outputs, "raw_images", checks_only=False, log=print):
        for name in ("raw_images.json", "raw_images_checks.json", f"raw_images/{picture}"):
            write_text(outputs.folder / "reports" / name, "{}")
        if blocked:
            # A file in place of the folder: nothing can be written below it.
            fsspec.filesystem("memory").pipe_file(str(outputs.address).removeprefix("memory:/"), b"")
        if error is not None:
            raise error


def closed() -> GateClosedError:
    return GateClosedError("a gate is closed", where="raw_images", fix="remove the image")


def test_results_are_uploaded_if_the_step_succeeds_and_if_a_gate_closes(outputs: OutputFolder) -> None:
    run_step(outputs)
    expected = [
        "reports/raw_images.json",
        "reports/raw_images/picture.jpg",
        "reports/raw_images_checks.json",
    ]
    assert names_at(outputs) == expected
    with pytest.raises(GateClosedError):
        run_step(outputs, closed(), picture="other.jpg")
    assert names_at(outputs) == sorted([*expected, "reports/raw_images/other.jpg"])


def test_a_step_that_fails_otherwise_uploads_nothing(outputs: OutputFolder) -> None:
    error = DatasetError("the folder contains no images", where="data", fix="add images")
    with pytest.raises(DatasetError, match="no images"):
        run_step(outputs, error)
    assert names_at(outputs) == []


def test_checks_without_their_stage_upload_only_their_results(outputs: OutputFolder) -> None:
    RemoteFolder(Url(str(outputs.address))).put("reports/raw_images/picture.jpg", b"of the last run")
    with stage_files(outputs, "raw_images", checks_only=True, log=print):
        write_text(outputs.folder / "reports/raw_images_checks.json", "{}")
    assert names_at(outputs) == ["reports/raw_images/picture.jpg", "reports/raw_images_checks.json"]


def test_an_upload_that_fails_does_not_hide_a_closed_gate(outputs: OutputFolder) -> None:
    with pytest.raises(GateClosedError):
        run_step(outputs, closed(), blocked=True)


def test_an_upload_that_fails_ends_a_step_that_succeeded(outputs: OutputFolder) -> None:
    with pytest.raises(StoreError, match="cannot be"):
        run_step(outputs, blocked=True)


def test_edited_captions_reach_the_machine_that_validates(address: Url, tmp_path: Path) -> None:
    editor, worker = (OutputFolder(address, tmp_path / name) for name in ("editor", "worker"))
    name = "captions/photos/a b.png.txt"
    write_text(editor.folder / name, "a red rose")
    editor.upload(name)
    fetch_stage(worker, "validated_dataset", checks_only=False)
    assert (worker.folder / name).read_text("utf-8") == "a red rose"
    editor.remove(name)
    fetch_for_command(worker)
    assert not (worker.folder / name).exists()


def test_a_caption_that_a_person_wrote_on_this_machine_is_never_lost(address: Url, tmp_path: Path) -> None:
    lines: list[str] = []
    editor = OutputFolder(address, tmp_path / "editor")
    worker = OutputFolder(address, tmp_path / "worker", log=lines.append)
    name, other = "captions/photos/a.png.txt", "captions/photos/b.png.txt"
    write_text(editor.folder / name, "a red rose")
    editor.upload(name)
    fetch_stage(worker, "captions", checks_only=False)
    assert lines == []

    # Not uploaded, because a person wrote them with an editor, or the service did not answer.
    write_text(worker.folder / name, "a lily")
    write_text(worker.folder / other, "a tulip")
    fetch_stage(worker, "captions", checks_only=False)
    assert (worker.folder / name).read_text("utf-8") == "a red rose"
    assert not (worker.folder / other).exists()
    copies = sorted((worker.folder / REPLACED_CAPTIONS).rglob("*.txt.*"))
    assert [copy.read_text("utf-8") for copy in copies] == ["a lily", "a tulip"]
    assert [str(copy) in line for copy, line in zip(copies, lines, strict=True)] == [True, True]
    fetch_for_command(worker)
    assert len(lines) == 2
