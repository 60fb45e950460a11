"""The instance and the recipes of `latentline run`; tests/e2e/test_run_command.py executes complete jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli.run import JobResult, command, dagster_home, results_text
from pipeline.errors import FileAccessError
from pipeline.recipe import Recipe, project_root, recipe_from_mapping

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


def recipes_named(*names: str) -> list[Recipe]:
    values = {"datasets": [{"name": "photos", "path": "data"}], "model": {"base": "a/b"}}
    return [recipe_from_mapping(name, {**values, "output_dir": f"outputs/{name}"}) for name in names]


def test_the_summary_of_several_recipes_says_how_each_ended_and_how_to_continue() -> None:
    recipes = recipes_named("a", "roses", "tulips", "asters")
    results = {"a": JobResult(0, 75.2), "roses": JobResult(1, 3.0), "tulips": JobResult(130, 3700.0)}
    root = project_root()
    assert results_text(recipes, results).splitlines() == [
        "4 recipes: 1 done, 1 failed, 1 stopped, 1 not started",
        f"  a       done             1:15  {root}/outputs/a/lora",
        "  roses   failed           0:03",
        "  tulips  stopped       1:01:40",
        "  asters  not started",
        "  to continue: latentline run roses tulips asters",
    ]
    text = results_text(recipes[:1], {"a": JobResult(0, 1.0)}, cache_only=True)
    assert text.splitlines() == ["1 recipe: 1 done", "  a  done      0:01"]


def test_a_recipe_that_is_named_twice_is_wrong_usage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    text = "datasets: [{name: p, path: p}]\noutput_dir: out\nmodel: {base: a/b}\n"
    (tmp_path / "roses.yaml").write_text(text, "utf-8")
    monkeypatch.setenv("LATENTLINE_CONFIGS", str(tmp_path))
    completed = CliRunner().invoke(command, ["roses", "roses"])
    assert completed.exit_code == 2
    assert "remove the repetition of roses" in completed.output
    for options, message in {
        ("roses", "--continue", "latest", "--cache-only"): "--continue and --cache-only exclude each other",
        ("roses", "roses", "--continue", "0123456789abcdef"): "A run belongs to one recipe",
    }.items():
        completed = CliRunner().invoke(command, options)
        assert completed.exit_code == 2
        assert message in completed.output
