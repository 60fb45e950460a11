"""Files of a stranger's dataset that are links, pipes or devices, or that are exchanged after the scan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.aspect_buckets import report as bucket_report
from pipeline.errors import DatasetError
from pipeline.images.decode import load_pixels
from pipeline.images.decode_limits import DECODE_MEMORY, MAX_DECODE_BYTES
from pipeline.images.formats import ImageError
from pipeline.images.geometry import Geometry
from pipeline.raw_images.sources import sources_of
from pipeline.reporting.findings import CheckContext
from pipeline.validated_dataset import checks
from pipeline.validated_dataset.dataset_page import write_dataset_page
from tests.hostile_images import float_tiff, jpeg_with_scans, png

pytestmark = pytest.mark.timeout(60)

SECRET = "AKIA0123456789 secret access key"


def reasons(result: Any) -> dict[str, str]:
    return dict(result.rejected.select("sample_id", "reason").rows())


@pytest.fixture
def linked(folder: Any, tmp_path: Path) -> Any:
    """A dataset of two images: the caption of one is a link to a file of the user."""
    secret = tmp_path / "credentials"
    secret.write_text(SECRET, encoding="utf-8")
    folder.add("good.png")
    folder.add("bad.png", caption=None).with_suffix(".txt").symlink_to(secret)
    return folder


def test_a_caption_that_links_out_of_the_dataset_is_rejected_with_file_and_fix(linked: Any) -> None:
    result = linked.ingest()
    assert reasons(result) == {"d/bad.png": "caption_outside_dataset"}
    (row,) = result.rejected.rows(named=True)
    assert "bad.txt" in row["detail"]
    assert "credentials" in row["detail"]
    assert "datasets[].follow_links: true" in row["fix"]
    assert SECRET not in str(result.table.rows()) + str(result.rejected.rows())


def test_the_gate_captions_decodable_closes_for_a_caption_outside_the_dataset(linked: Any) -> None:
    linked.ingest()
    findings = {each.name: each for each in checks.run(CheckContext(linked.recipe, linked.tables))}
    assert findings["captions_decodable"].closes
    assert "follow_links" in findings["captions_decodable"].fix


def test_follow_links_reads_such_a_caption_and_switching_it_off_rejects_it_again(linked: Any) -> None:
    linked.dataset = {"follow_links": True}
    captions = dict(linked.ingest().table.select("path", "caption").rows())
    assert captions["bad.png"] == SECRET
    linked.dataset = {}
    assert reasons(linked.ingest()) == {"d/bad.png": "caption_outside_dataset"}


def test_a_caption_linked_inside_the_dataset_and_an_image_linked_outside_are_used(
    folder: Any, tmp_path: Path
) -> None:
    (tmp_path / "outside.png").write_bytes(folder.picture(7))
    folder.add("a.png")
    folder.add("b.png", caption=None).with_suffix(".txt").symlink_to("a.txt")
    (folder.root / "c.png").symlink_to(tmp_path / "outside.png")
    (folder.root / "c.txt").write_text("outside", encoding="utf-8")
    scanned = folder.scan()
    assert scanned.report["named"]["links_out"] == ["d/c.png"]
    assert folder.validate().table["path"].to_list() == ["a.png", "b.png", "c.png"]


def test_the_environment_of_the_process_is_no_caption(folder: Any) -> None:
    folder.add("a.png", caption=None).with_suffix(".txt").symlink_to("/proc/self/environ")
    assert reasons(folder.ingest()) == {"d/a.png": "caption_outside_dataset"}


def test_a_manifest_image_with_a_linked_caption_is_rejected(linked: Any, tmp_path: Path) -> None:
    manifest = linked.root / "list.csv"
    manifest.write_text("path\ngood.png\nbad.png\n", encoding="utf-8")
    linked.dataset = {"path": str(manifest)}
    assert reasons(linked.ingest()) == {"d/bad.png": "caption_outside_dataset"}


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_caption_that_is_a_pipe_or_device_is_rejected_without_waiting(folder: Any, kind: str) -> None:
    caption = folder.add("a.png", caption=None).with_suffix(".txt")
    if kind == "fifo":
        os.mkfifo(caption)
    else:
        caption.symlink_to("/dev/zero")
        folder.dataset = {"follow_links": True}
    result = folder.ingest()
    assert reasons(result) == {"d/a.png": "caption_unreadable"}
    assert "not a regular file" in result.rejected["detail"].item()


def as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_endless_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def as_huge_file(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(10**10)


@pytest.mark.parametrize(
    ("exchange", "reason"),
    [(as_fifo, "special_file"), (as_endless_link, "special_file"), (as_huge_file, "file_too_large")],
)
def test_an_image_exchanged_after_the_scan_is_rejected_and_the_others_are_kept(
    folder: Any, exchange: Callable[[Path], None], reason: str
) -> None:
    folder.add("good.png")
    bad = folder.add("bad.png")
    folder.scan()
    exchange(bad)
    result = folder.validate()
    assert reasons(result) == {"d/bad.png": reason}
    assert result.table["path"].to_list() == ["good.png"]
    write_dataset_page(folder.recipe, result.table, result.rejected, log=folder.log.append)


@pytest.mark.parametrize(
    ("exchange", "reason"),
    [(as_fifo, "special_file"), (as_endless_link, "special_file"), (as_huge_file, "file_too_large")],
)
def test_an_image_exchanged_after_validation_fails_alone_in_encoder_checks_and_pictures(
    folder: Any, exchange: Callable[[Path], None], reason: str
) -> None:
    bad = folder.add("bad.png")
    folder.ingest()
    result = folder.assign()
    exchange(bad)
    (row,) = result.table.rows(named=True)
    with pytest.raises(ImageError) as caught:
        load_pixels(
            sources_of(folder.recipe)["d"].file("bad.png"),
            Geometry.from_row(row),
            (255, 255, 255),
            content_hash=row["content_hash"],
        )
    assert caught.value.reason == reason
    bucket_report.write_bucket_report(folder.recipe, result.table, log=folder.log.append)
    (finding,) = (
        each
        for each in checks.run(CheckContext(folder.recipe, folder.tables))
        if each.name == "file_size_outliers"
    )
    assert "bad.png" in finding.summary


def test_a_content_that_passed_with_a_higher_limit_is_rejected_when_the_limit_is_lowered(
    folder: Any, settled: Callable[[], None]
) -> None:
    settled()
    folder.add("large.png", folder.picture(1, 200, 200))
    folder.add("small.png", folder.picture(2, 20, 20))
    assert len(folder.ingest().table) == 2
    folder.checks = {"max_decode_bytes": 100_000}
    result = folder.ingest()
    assert result.report["decoded"] == 0
    assert reasons(result) == {"d/large.png": "too_much_memory"}
    folder.checks = {}
    assert len(folder.ingest().table) == 2


def test_the_encoder_does_not_decode_content_that_was_not_validated(folder: Any) -> None:
    image = folder.add("a.png", folder.picture(1, 64, 64))
    folder.ingest()
    (row,) = folder.assign().table.rows(named=True)
    image.write_bytes(png())  # needs 1.1 GB to decode
    with DECODE_MEMORY.reserved(MAX_DECODE_BYTES), pytest.raises(ImageError) as caught:
        load_pixels(
            sources_of(folder.recipe)["d"].file("a.png"),
            Geometry.from_row(row),
            (255, 255, 255),
            content_hash=row["content_hash"],
        )
    assert caught.value.reason == "changed"


@pytest.mark.parametrize("name", ["list.csv", "list.jsonl", "list.parquet"])
def test_a_manifest_that_is_a_pipe_is_an_error_with_a_fix(folder: Any, name: str) -> None:
    os.mkfifo(folder.root / name)
    folder.dataset = {"path": str(folder.root / name)}
    with pytest.raises(DatasetError, match="not a regular file") as caught:
        folder.scan()
    assert caught.value.where == str(folder.root / name)


def test_a_manifest_above_the_limit_is_an_error_with_a_fix(folder: Any) -> None:
    manifest = folder.root / "list.csv"
    manifest.write_text("path\n" + "a.png\n" * 100, encoding="utf-8")
    folder.dataset, folder.checks = {"path": str(manifest)}, {"max_file_bytes": 500}
    with pytest.raises(DatasetError, match="at most 500 bytes, got 605") as caught:
        folder.scan()
    assert "checks.max_file_bytes to 605" in caught.value.fix


def test_a_sparse_image_is_rejected_from_its_size_and_the_limit_can_be_raised(folder: Any) -> None:
    huge = folder.add("huge.jpg", folder.picture(1, kind="JPEG"))
    with huge.open("r+b") as file:
        file.truncate(6 * 10**9)
    good = folder.add("good.png")
    result = folder.ingest()
    assert reasons(folder.scan()) == {"d/huge.jpg": "file_too_large"}
    assert result.table["path"].to_list() == ["good.png"]

    folder.checks = {"max_file_bytes": good.stat().st_size - 1}
    assert reasons(folder.scan()) == {"d/huge.jpg": "file_too_large", "d/good.png": "file_too_large"}
    folder.checks = {"max_file_bytes": good.stat().st_size}
    assert reasons(folder.scan()) == {"d/huge.jpg": "file_too_large"}


_SCAN_AND_VALIDATE = """
import json, re, sys
from pathlib import Path
from pipeline.raw_images.stage import scan
from pipeline.recipe import Recipe
from pipeline.storage.tables import Tables
from pipeline.validated_dataset.stage import validate

recipe = Recipe.model_validate_json(sys.stdin.read())
tables = Tables(recipe.output_dir)
scanned = scan(recipe, tables, log=str)
result = validate(recipe, scanned.table, tables, log=str)
rejected = [row for each in (scanned, result) for row in each.rejected.select("path", "reason").rows()]
# ru_maxrss would include the peak of the process that started this one.
peak_mb = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024
print(json.dumps([len(result.table), dict(rejected), scanned.report["passed_over"], peak_mb]))
"""


def test_twenty_good_images_are_kept_among_all_attack_files_within_the_memory(folder: Any) -> None:
    for number in range(20):
        folder.add(f"good{number}.png", folder.picture(number))
    folder.add("float.tif", float_tiff())
    folder.add("deep.png", png())
    folder.add("scans.jpg", jpeg_with_scans(2_000, edge_px=512))
    os.truncate(folder.add("sparse.jpg", b"\xff\xd8\xff"), 6 * 10**9)
    folder.add("linked.png", caption=None).with_suffix(".txt").symlink_to("/proc/self/environ")
    (folder.root / "zero.png").symlink_to("/dev/zero")
    os.mkfifo(folder.root / "fifo.jpg")

    process = subprocess.run(
        [sys.executable, "-c", _SCAN_AND_VALIDATE],
        input=folder.recipe.model_dump_json(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    num_kept, rejected, passed_over, peak_mb = json.loads(process.stdout)
    assert num_kept == 20
    assert rejected == {
        "float.tif": "too_much_memory",
        "deep.png": "too_much_memory",
        "scans.jpg": "too_many_scans",
        "sparse.jpg": "file_too_large",
        "linked.png": "caption_outside_dataset",
    }
    assert passed_over["special"] == 2
    assert peak_mb < 1_500
