"""`dagster` commands with a broken and with a valid recipe."""

from __future__ import annotations

import pytest

BROKEN = """\
datasets:
  - {name: photos, path: data/x}
output_dir: outputs/bad
model: {base: models/tiny-sd}
training: {stepz: 3,
  batch_size: eight}
recache: {enabled: "False"}
"""


@pytest.mark.slow
def test_three_mistakes_in_a_recipe_are_reported_together_with_line_and_fix(fresh) -> None:
    (fresh.file.parent / "bad.yaml").write_text(BROKEN, encoding="utf-8")
    process = fresh.dagster("job", "execute", "-m", "assets.definitions", "-j", "bad_cache")
    assert process.returncode == 1
    message = process.stderr[process.stderr.rindex("\nRecipeError: ") :]
    assert "Traceback" not in message
    for line, value, fix in ((5, "stepz", "steps"), (6, "eight", "integer"), (7, '"False"', "false")):
        [mistake] = [part for part in message.split("\n\n") if f"bad.yaml:{line}," in part]
        assert value in mistake
        assert fix in mistake[mistake.index("fix:") :]


@pytest.mark.slow
def test_the_job_of_a_recipe_runs_next_to_a_broken_one_which_is_reported_in_one_line(cached) -> None:
    (cached.file.parent / "bad.yaml").write_text(BROKEN, encoding="utf-8")
    (cached.file.parent / "other-name.yaml").write_text(BROKEN, encoding="utf-8")
    process = cached.dagster("job", "execute", "-m", "assets.definitions", "-j", "small_cache")
    assert process.returncode == 0, process.stderr[-3000:]
    reported = [line for line in process.stderr.splitlines() if "is excluded" in line]
    assert [line.split(":")[:2] for line in reported] == [
        ["warning", " recipe bad is excluded"],
        ["warning", " recipe other-name is excluded"],
    ]
    assert "stepz" not in process.stderr


@pytest.mark.slow
def test_the_definitions_validate_with_a_broken_recipe(fresh) -> None:
    (fresh.file.parent / "bad.yaml").write_text(BROKEN, encoding="utf-8")
    process = fresh.dagster("definitions", "validate", "-m", "assets.definitions")
    assert process.returncode == 0, process.stderr
    assert "recipe bad is excluded: 3 mistakes in" in process.stderr + process.stdout


def test_M9_in_strict_mode_the_definitions_do_not_validate_with_a_broken_recipe(fresh) -> None:
    (fresh.file.parent / "bad.yaml").write_text(BROKEN, encoding="utf-8")
    command = fresh.command("definitions", "validate", "-m", "assets.definitions")
    process = fresh.run(command, LATENTLINE_STRICT="1")
    assert process.returncode == 1
    output = process.stderr + process.stdout
    assert "recipe bad is excluded: 3 mistakes in" in output
    assert "unset LATENTLINE_STRICT" in output

    (fresh.file.parent / "bad.yaml").unlink()
    assert fresh.run(command, LATENTLINE_STRICT="1").returncode == 0
