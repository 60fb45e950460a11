"""Folders that a user names on the command line, as a recipe names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cli.arguments import as_recipes_have_it
from pipeline.recipe import project_root


def test_a_folder_below_the_project_root_is_named_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project_root() / "pipeline")
    assert as_recipes_have_it("models") == "pipeline/models"


def test_a_folder_elsewhere_is_named_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert as_recipes_have_it("model") == str(tmp_path / "model")


def test_what_is_not_there_stays_as_it_is_such_as_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert as_recipes_have_it("owner/name") == "owner/name"
