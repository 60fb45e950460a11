"""The Dagster instance of `latentline run`; tests/e2e/test_run_command.py executes complete jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cli.run import dagster_home
from pipeline.errors import FileAccessError

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("variable", [None, ""])
def test_the_instance_is_in_the_project_unless_dagster_home_is_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str | None
) -> None:
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    if variable is not None:
        monkeypatch.setenv("DAGSTER_HOME", variable)
    monkeypatch.chdir(tmp_path)
    assert dagster_home() == ROOT / ".dagster"
    assert (dagster_home() / "dagster.yaml").is_file()


def test_dagster_home_selects_another_instance(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    assert dagster_home() == tmp_path


def test_a_missing_folder_of_the_instance_is_an_error_with_a_fix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "missing"))
    with pytest.raises(FileAccessError) as raised:
        dagster_home()
    assert str(tmp_path / "missing") in raised.value.what
    assert "unset DAGSTER_HOME" in raised.value.fix
