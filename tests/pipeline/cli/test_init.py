"""`latentline init`, and commands in the folder that it writes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.errors import FileAccessError
from pipeline.recipe import project, project_root
from pipeline.recipe.project import MARKER, PROJECT_VARIABLE, project_variables
from tests.command_line import latentline, latentline_command

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _other_projects() -> Iterator[None]:
    """Let each command find its project, as in a process of its own."""
    project_root.cache_clear()
    yield
    project_root.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project folder, which is the working directory."""
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    monkeypatch.delenv("LATENTLINE_CONFIGS", raising=False)
    assert latentline("init", str(tmp_path / "project")).returncode == 0
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def test_recipes_and_results_are_in_the_project(folder: Path, photos_once: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "flowers").symlink_to(photos_once)
    (folder / "data" / "below").mkdir()
    os.chdir(folder / "data" / "below")
    arguments = (
        "--images",
        str(folder / "data" / "flowers"),
        "--base",
        str(ROOT / "demo" / "base"),
        "--resolution",
        "64",
    )
    assert latentline("new", "flowers", *arguments).returncode == 0
    assert "path: data/flowers" in (folder / "configs" / "flowers.yaml").read_text("utf-8")
    validated = latentline("validate", "flowers")
    assert validated.returncode == 0, validated.stderr
    assert "flowers" in validated.stdout
    assert project_variables() == {PROJECT_VARIABLE: str(folder)}


def test_a_process_in_another_folder_finds_the_project(folder: Path, tmp_path: Path) -> None:
    text = (folder / "configs" / "examples" / "flowers_sd15.yaml").read_text("utf-8")
    (folder / "configs" / "flowers.yaml").write_text(text, "utf-8")
    environment = {**os.environ, PROJECT_VARIABLE: str(folder), "LATENTLINE_UNTRUSTED": "1"}
    completed = subprocess.run(
        latentline_command("validate", "flowers"),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert str(folder / "data" / "flowers") in completed.stderr


def test_a_stranger_s_recipe_reads_only_the_project(folder: Path, photos_once: Path) -> None:
    text = (folder / "configs" / "examples" / "flowers_sd15.yaml").read_text("utf-8")
    for path in (photos_once, ROOT / "data", ".dagster", "."):
        (folder / "configs" / "flowers.yaml").write_text(text.replace("data/flowers ", f"{path} "), "utf-8")
        completed = latentline("validate", "flowers", LATENTLINE_UNTRUSTED="1")
        assert "must be a path inside the project" in completed.stderr


def test_existing_files_are_not_overwritten(folder: Path, tmp_path: Path) -> None:
    again = latentline("init")
    assert again.returncode == 1
    assert "never overwritten" in again.stderr
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "workspace.yaml").write_text("mine", "utf-8")
    assert "workspace.yaml already exists" in latentline("init", str(tmp_path / "other")).stderr
    assert sorted(each.name for each in (tmp_path / "other").iterdir()) == ["workspace.yaml"]


def test_installed_packages_are_no_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(project, "_CODE_ROOT", tmp_path / "site-packages")
    with pytest.raises(FileAccessError, match="latentline init FOLDER"):
        project_root()


def test_a_checkout_in_a_project_folder_is_a_project_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "configs").mkdir(parents=True)
    (checkout / "pyproject.toml").touch()
    (tmp_path / MARKER).touch()
    monkeypatch.setattr(project, "_CODE_ROOT", checkout)
    monkeypatch.chdir(checkout / "configs")
    assert project_root() == checkout
