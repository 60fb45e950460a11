"""What `dagster` commands answer for a broken recipe and for a good one."""

from __future__ import annotations

BROKEN = """\
datasets:
  - {name: photos, path: data/x}
output_dir: outputs/bad
model: {base: models/tiny-sd}
training: {stepz: 3,
  batch_size: eight}
recache: {enabled: "False"}
"""


def test_three_mistakes_of_a_recipe_are_reported_at_once_with_line_and_fix(fresh) -> None:
    (fresh.file.parent / "bad.yaml").write_text(BROKEN, encoding="utf-8")
    done = fresh.dagster("job", "execute", "-m", "assets.definitions", "-j", "bad_train")
    assert done.returncode != 0
    last = done.stderr[done.stderr.rindex("\nRecipeError: ") :]
    assert "Traceback" not in last
    for line, value, fix in ((5, "stepz", "steps"), (6, "eight", "whole number"), (7, '"False"', "false")):
        [mistake] = [part for part in last.split("\n\n") if f"bad.yaml:{line}," in part]
        assert value in mistake
        assert fix in mistake[mistake.index("fix:") :]


def test_definitions_validate(fresh) -> None:
    done = fresh.dagster("definitions", "validate", "-m", "assets.definitions")
    assert done.returncode == 0, done.stderr
