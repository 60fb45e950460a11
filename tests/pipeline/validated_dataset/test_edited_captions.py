"""Captions that a person has edited win over the dataset's, and only they are read and encoded again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.cli.main import latentline
from pipeline.errors import DatasetError, LatentlineError
from pipeline.reporting.findings import CheckContext
from pipeline.validated_dataset import checks
from pipeline.validated_dataset.edited_captions import (
    EditedCaptions,
    current_captions,
    edit_captions,
    edited_file,
    restore_captions,
)


def captions(folder: Any) -> dict[str, tuple[str, list[str], str]]:
    return {
        row["sample_id"]: (row["caption"], json.loads(row["more_captions"]), row["caption_from"])
        for row in folder.validate().table.rows(named=True)
    }


def edit(folder: Any, sample_id: str, *texts: str) -> Path:
    return edit_captions(folder.recipe, sample_id, texts, folder.log.append)


def finding(folder: Any, name: str) -> Any:
    context = CheckContext(folder.recipe, folder.tables)
    return next(each for each in checks.run(context) if each.name == name)


@pytest.fixture
def roses(folder: Any) -> Any:
    """Return a dataset with two images of one name and one in a subfolder."""
    folder.add("a.png", caption="from the dataset")
    folder.add("deep/b.png", caption="untouched")
    folder.ingest()
    return folder


def test_an_edit_wins_over_the_dataset_which_stays_and_restoring_removes_every_trace(roses: Any) -> None:
    before = captions(roses)
    file = edit(roses, "d/a.png", "  edited \r\n in two lines ")
    assert file == roses.output_dir / "captions" / "d" / "a.png.txt"
    after = captions(roses)
    assert after["d/a.png"] == ("edited\nin two lines", [], "edit")
    assert after["d/deep/b.png"] == before["d/deep/b.png"]
    assert (roses.root / "a.txt").read_text("utf-8") == "from the dataset"

    edit(roses, "d/a.png", "edited again")
    assert captions(roses)["d/a.png"][0] == "edited again"
    assert restore_captions(roses.recipe, "d/a.png", roses.log.append)
    assert captions(roses) == before
    assert not (roses.output_dir / "captions").exists()
    assert not restore_captions(roses.recipe, "d/a.png", roses.log.append)


def test_names_that_differ_in_the_suffix_have_edits_of_their_own(folder: Any) -> None:
    folder.captions["suffix"] = ".txt"
    folder.add("a.png", caption="shared")
    folder.add("a.jpg", folder.picture(7, kind="JPEG"), caption="shared")
    folder.scan()
    edit(folder, "d/a.jpg", "the photo")
    texts = captions(folder)
    assert (texts["d/a.jpg"][0], texts["d/a.png"][0]) == ("the photo", "shared")


def test_several_captions_are_stored_exactly(roses: Any) -> None:
    edit(roses, "d/a.png", "one\n\nparagraph", "another")
    assert captions(roses)["d/a.png"][:2] == ("one\nparagraph", ["another"])
    assert current_captions(roses.recipe, "d/a.png", "a.png").texts == ("one\nparagraph", "another")


def test_lines_trigger_and_prefix_apply_to_an_edit_and_replace_does_not(roses: Any) -> None:
    roses.captions.update(
        lines="each", prefix="photo of ", trigger="sks", replace=[{"find": "cat", "with": "sks cat"}]
    )
    edit(roses, "d/a.png", "a sks cat\na cat")
    texts = captions(roses)
    assert texts["d/a.png"][:2] == ("photo of a sks cat", ["photo of sks, a cat"])
    assert current_captions(roses.recipe, "d/a.png", "a.png").texts == ("a sks cat", "a cat")
    assert not (roses.output_dir / "reports" / "validated_dataset" / "replaced.csv").exists()


@pytest.mark.parametrize("caption", [None, "", b"\xff\xfe\xfd"])
def test_an_edit_gives_a_caption_to_an_image_that_was_rejected_for_its_own(folder: Any, caption: Any) -> None:
    folder.add("a.png", caption=caption)
    assert len(folder.ingest().rejected) == 1
    edit(folder, "d/a.png", "written by a person")
    assert captions(folder)["d/a.png"][0] == "written by a person"


def test_an_edit_wins_over_a_manifest_and_a_fixed_text(folder: Any) -> None:
    folder.captions.update({"from": "fixed", "text": "the same"})
    folder.add("a.png", caption=None)
    folder.add("b.png", caption=None)
    folder.scan()
    edit(folder, "d/b.png", "another")
    assert {key: value[::2] for key, value in captions(folder).items()} == {
        "d/a.png": ("the same", "fixed"),
        "d/b.png": ("another", "edit"),
    }


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(b" \n\n ", "caption_empty", id="empty"),
        pytest.param(b"\xff\xfe\xfd", "caption_undecodable", id="not UTF-8"),
        pytest.param(b"%PDF-1.7", "caption_undecodable", id="another type"),
        pytest.param(b"a" * 1_000_001, "caption_unreadable", id="too large"),
    ],
)
def test_an_unusable_edit_rejects_its_image_and_names_the_file(roses: Any, data: bytes, reason: str) -> None:
    edit(roses, "d/a.png", "x").write_bytes(data)
    [row] = roses.validate().rejected.rows(named=True)
    assert (row["sample_id"], row["reason"]) == ("d/a.png", reason)
    assert "d/a.png.txt" in row["detail"]


def test_a_link_to_a_file_outside_is_not_read(roses: Any, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("a password", "utf-8")
    file = edit(roses, "d/a.png", "x")
    file.unlink()
    file.symlink_to(secret)
    [row] = roses.validate().rejected.rows(named=True)
    assert row["reason"] == "caption_outside_dataset"


def test_C15_an_edit_without_image_is_a_warning_that_names_the_file(roses: Any) -> None:
    edit(roses, "d/a.png", "x")
    roses.validate()
    assert finding(roses, "edits_matched").passed
    edit(roses, "d/gone \x1b[31m.png", "x")
    (roses.output_dir / "captions" / "d" / "deep").mkdir()
    (roses.output_dir / "captions" / "d" / "deep" / "b.caption").write_text("x", "utf-8")
    roses.validate()
    failed = finding(roses, "edits_matched")
    assert not failed.passed
    assert failed.numbers["unmatched_edits"] == 2
    assert [row["file"] for row in failed.rows] == [
        "captions/d/deep/b.caption",
        r"captions/d/gone \x1b[31m.png.txt",
    ]


def test_an_edit_of_a_rejected_image_has_an_image(roses: Any) -> None:
    roses.add("broken.png", b"", caption="x")
    edit(roses, "d/broken.png", "x")
    roses.ingest()
    assert finding(roses, "edits_matched").passed


@pytest.mark.parametrize(
    "sample_id", ["", "d", "d/", "/a", "d/../../x", "../x", "d//a", "d/./a", "d/a\0.png"]
)
def test_ids_that_lead_elsewhere_are_refused(tmp_path: Path, sample_id: str) -> None:
    with pytest.raises(DatasetError, match="not the id of a sample"):
        edited_file(tmp_path, sample_id)


@pytest.mark.parametrize("text", ["", " \n", "\u200b", "\ud800", "<lora:x:1>", "a" * 1_000_001])
def test_unusable_texts_are_refused_and_write_nothing(roses: Any, text: str) -> None:
    with pytest.raises(LatentlineError):
        edit(roses, "d/a.png", text)
    assert not (roses.output_dir / "captions").exists()


def test_the_command_edits_shows_lists_and_restores(roses: Any, tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    values = {
        "datasets": [{"name": "d", "path": str(roses.root)}],
        "output_dir": str(roses.output_dir),
        "cache_dir": str(tmp_path / "cache_of_file"),
        "model": {"base": "no model"},
    }
    file.write_text(json.dumps(values), "utf-8")

    def call(*arguments: str) -> Any:
        result = CliRunner().invoke(latentline, ["edit-caption", str(file), *arguments])
        return result.stdout if result.exit_code == 0 else result

    assert call() == "no caption is edited\n"
    assert call("a.png") == "d/a.png, from sidecar:a.txt\n  from the dataset\n"
    hostile = "--restore $(touch x) `x` \x1b[31m"
    assert "the next job reads it: latentline run small" in call("--", "a.png", hostile)
    assert call() == "d/a.png\n"
    assert call("a.png") == "d/a.png, from edit\n  --restore $(touch x) `x` [31m\n"
    assert captions(roses)["d/a.png"][0] == "--restore $(touch x) `x` [31m"
    assert call("--restore", "a.png", "text").exit_code == 2
    assert "has the caption of the dataset again" in call("--restore", "a.png")
    assert "has no edited caption" in call("--restore", "a.png")
    assert EditedCaptions(roses.output_dir).files == {}
