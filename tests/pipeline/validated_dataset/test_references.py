from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import DatasetError
from pipeline.images.decode import decoded
from pipeline.reporting.findings import CheckContext, Finding
from pipeline.reporting.reports import StageResult
from pipeline.validated_dataset.checks import run
from pipeline.validated_dataset.report import write_dataset_report
from tests.pipeline.dataset_folder import Folder, picture


def draw(path: Path, seed: int = 0, size_hw: tuple[int, int] = (24, 40)) -> Path:
    """Write an image of random pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture(seed, *size_hw, kind=path.suffix[1:].upper()))
    return path


@pytest.fixture
def before(folder: Folder, tmp_path: Path) -> Path:
    """Return the first of two folders of references of a.png and sub/b.png; a.png lacks its first."""
    folder.dataset["references"] = [{"path": str(tmp_path / "before")}, {"path": str(tmp_path / "style")}]
    folder.add("a.png")
    folder.add("sub/b.png")
    draw(tmp_path / "before" / "sub" / "b.png", 1)
    draw(tmp_path / "style" / "sub" / "b.png", 2)
    draw(tmp_path / "style" / "a.png", 3)
    return tmp_path / "before"


def failing(folder: Folder) -> dict[str, Finding]:
    return {each.name: each for each in run(CheckContext(folder.recipe, folder.tables)) if not each.passed}


def reasons(result: StageResult) -> dict[str, str]:
    return dict(result.rejected.select("sample_id", "reason").rows())


def references(result: StageResult) -> dict[str, list[dict[str, Any]]]:
    rows = result.table.select("sample_id", "reference_images").rows()
    return {sample_id: json.loads(images) for sample_id, images in rows if images is not None}


def test_E01_each_image_gets_the_references_of_its_relative_path_in_the_recipes_order(
    folder: Folder, before: Path
) -> None:
    draw(before / "a.webp", 4, (30, 20))
    result = folder.ingest()
    images = references(result)
    assert [[each["path"] for each in images[name]] for name in ("d/a.png", "d/sub/b.png")] == [
        ["a.webp", "a.png"],
        ["sub/b.png", "sub/b.png"],
    ]
    assert [(each["height"], each["width"]) for each in images["d/a.png"]] == [(30, 20), (24, 40)]
    assert len({each["hash"] for both in images.values() for each in both}) == 4
    assert failing(folder) == {}

    swapped = [*reversed(folder.dataset["references"])]  # type: ignore[call-overload]
    folder.dataset["references"] = swapped
    assert references(folder.ingest()) == {name: each[::-1] for name, each in images.items()}


def test_tables_and_reports_of_a_recipe_without_references_have_no_trace_of_them(folder: Folder) -> None:
    folder.add("a.png")
    result = folder.ingest()
    assert [name for name in (*result.table.columns, *result.report) if "reference" in name] == []
    assert list(result.report["named"]) == ["caption_conflicts"]
    assert not (folder.output_dir / "tables" / "known" / "references.parquet").exists()


def _missing(before: Path) -> None: ...


def _truncated(before: Path) -> None:
    draw(before / "a.png")
    (before / "a.png").write_bytes((before / "a.png").read_bytes()[:400])


def _ambiguous(before: Path) -> None:
    draw(before / "a.png")
    draw(before / "a.webp")


def _too_large(before: Path) -> None:
    draw(before / "a.png", size_hw=(40, 40))


def _other_case(before: Path) -> None:
    draw(before / "A.png")


def _in_another_folder(before: Path) -> None:
    draw(before / "sub" / "a.png")


BROKEN: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "missing": (_missing, "reference_missing", "references_present"),
    "a pipe": (lambda at: os.mkfifo(at / "a.png"), "reference_missing", "references_present"),
    "a folder": (lambda at: (at / "a.png").mkdir(), "reference_missing", "references_present"),
    "a broken link": (
        lambda at: (at / "a.png").symlink_to("nowhere.png"),
        "reference_missing",
        "references_present",
    ),
    "two files": (_ambiguous, "reference_ambiguous", "references_present"),
    "another case": (_other_case, "reference_missing", "references_present"),
    "in another folder": (_in_another_folder, "reference_missing", "references_present"),
    "a text": (lambda at: (at / "a.txt").write_text("a"), "reference_missing", "references_present"),
    "empty": (lambda at: (at / "a.png").touch(), "reference_empty_file", "references_usable"),
    "not an image": (
        lambda at: (at / "a.png").write_bytes(b"a text that someone called a picture"),
        "reference_not_an_image",
        "references_usable",
    ),
    "truncated": (_truncated, "reference_truncated", "references_usable"),
    "too large": (_too_large, "reference_too_large", "references_usable"),
}
"""Mistakes in the first reference of a.png, with the reason of its rejection and the gate that closes."""


@pytest.mark.parametrize("name", BROKEN)
def test_E01_an_image_with_a_broken_reference_is_rejected_with_a_fix_and_closes_a_gate(
    folder: Folder, before: Path, name: str
) -> None:
    break_reference, reason, gate = BROKEN[name]
    folder.checks["max_image_pixels"] = 1_000
    break_reference(before)
    result = folder.ingest()
    assert reasons(result) == {"d/a.png": reason}
    assert result.table["sample_id"].to_list() == ["d/sub/b.png"]
    assert result.rejected["fix"][0]
    assert result.rejected["detail"][0].startswith("references[0]: ")
    finding = failing(folder)[gate]
    assert finding.closes
    assert finding.rows[0]["sample_id"] == "d/a.png"
    assert result.rejected["detail"][0] in finding.summary


def test_images_that_share_a_reference_by_name_are_rejected(folder: Folder, before: Path) -> None:
    folder.add("a.webp", folder.picture(kind="WEBP"))
    draw(before / "a.png")
    assert reasons(folder.ingest()) == dict.fromkeys(["d/a.png", "d/a.webp"], "reference_shared")


def test_E01_a_reference_without_an_image_closes_a_gate_that_names_its_file(
    folder: Folder, before: Path
) -> None:
    draw(before / "a.png")
    stray = draw(before / "rose.png")
    assert folder.ingest().report["unmatched_references"] == 1
    finding = failing(folder)["references_matched"]
    assert finding.closes
    assert finding.rows == [{"reference": f"d: {stray}"}]


def test_references_in_the_datasets_own_folder_have_a_suffix_and_are_not_images(folder: Folder) -> None:
    folder.dataset["references"] = [{"path": str(folder.root), "suffix": "-before"}]
    folder.add("a.png")
    draw(folder.root / "a-before.png", 5)
    result = folder.ingest()
    assert {name: each[0]["path"] for name, each in references(result).items()} == {"d/a.png": "a-before.png"}
    assert failing(folder) == {}


def test_references_in_a_subfolder_of_the_dataset_are_not_images(folder: Folder) -> None:
    folder.dataset["references"] = [{"path": str(folder.root / "before")}]
    folder.add("a.png")
    draw(folder.root / "before" / "a.png", 5)
    assert list(references(folder.ingest())) == ["d/a.png"]


def test_a_column_of_the_manifest_names_references_which_images_may_share(
    folder: Folder, tmp_path: Path
) -> None:
    for name in ("a.png", "b.png", "c.png"):
        folder.add(name)
    draw(folder.root / "before" / "one.png", 5)
    manifest = folder.root / "list.csv"
    manifest.write_text("path,before\na.png,before/one.png\nb.png,before/one.png\nc.png,\n", encoding="utf-8")
    folder.dataset |= {"path": str(manifest), "references": [{"column": "before"}]}
    result = folder.ingest()
    assert {name: each[0]["path"] for name, each in references(result).items()} == {
        "d/a.png": "before/one.png",
        "d/b.png": "before/one.png",
    }
    assert reasons(result) == {"d/c.png": "reference_missing"}
    manifest.write_text("path,before\na.png,before/two.png\n", encoding="utf-8")
    assert reasons(folder.ingest()) == {"d/a.png": "reference_not_found"}
    assert failing(folder)["references_present"].closes
    folder.dataset["references"] = [{"column": "after"}]
    with pytest.raises(DatasetError, match="no column 'after'") as excinfo:
        folder.ingest()
    assert "references[0].column to the column with the paths of the references" in excinfo.value.fix


def test_copies_with_other_references_are_both_kept(folder: Folder, before: Path, tmp_path: Path) -> None:
    draw(before / "a.png", 7)
    folder.add("copy.png", (folder.root / "a.png").read_bytes())
    draw(before / "copy.png", 8)
    draw(tmp_path / "style" / "copy.png", 3)
    assert folder.ingest().table["sample_id"].to_list() == ["d/a.png", "d/copy.png", "d/sub/b.png"]
    draw(before / "copy.png", 7)
    assert reasons(folder.ingest()) == {"d/copy.png": "duplicate"}


def test_unchanged_references_are_not_read_again(
    folder: Folder, before: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(before / "a.png", 4)
    # Files of this test are younger than the granularity of the clock.
    monkeypatch.setattr("pipeline.validated_dataset.paired_files.CLOCK_GRANULARITY_NS", -(10**18))
    first = references(folder.ingest())
    num_decoded = 0

    def counting(*arguments: Any, **options: Any) -> Any:
        nonlocal num_decoded
        num_decoded += 1
        return decoded(*arguments, **options)

    monkeypatch.setattr("pipeline.side_inputs.images.decoded", counting)
    assert references(folder.validate()) == first
    assert num_decoded == 0
    draw(before / "a.png", 9)
    second = references(folder.validate())
    assert num_decoded == 1
    assert [name for name in first if first[name] != second[name]] == ["d/a.png"]


def test_a_dataset_that_got_references_since_the_table_was_written_closes_the_gate(
    folder: Folder, before: Path
) -> None:
    draw(before / "a.png", 4)
    both = folder.dataset.pop("references")
    folder.ingest()
    folder.dataset["references"] = both
    assert "run the cache job again" in failing(folder)["references_present"].fix
    folder.ingest()
    assert failing(folder) == {}
    folder.dataset["references"] = both[:1]  # type: ignore[index]
    assert "samples without the references" in failing(folder)["references_present"].summary


def test_the_report_shows_images_after_their_references_and_follows_an_edit(
    folder: Folder, before: Path
) -> None:
    draw(before / "a.png", 4)
    sheets: list[bytes] = []
    for seed in (4, 5):
        draw(before / "a.png", seed)
        result = folder.ingest()
        report = write_dataset_report(folder.recipe, result.table, result.rejected, log=folder.log.append)
        sheets.append((report / "references.jpg").read_bytes())
    assert sheets[0] != sheets[1]

    del folder.dataset["references"]
    result = folder.ingest()
    report = write_dataset_report(folder.recipe, result.table, result.rejected, log=folder.log.append)
    assert not (report / "references.jpg").exists()
