"""`dagster` commands with a broken and with a valid recipe."""

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


def test_three_mistakes_in_a_recipe_are_reported_together_with_line_and_fix(fresh) -> None:
    (fresh.file.parent / "bad.yaml").write_text(BROKEN, encoding="utf-8")
    process = fresh.dagster("job", "execute", "-m", "assets.definitions", "-j", "bad_train")
    assert process.returncode != 0
    message = process.stderr[process.stderr.rindex("\nRecipeError: ") :]
    assert "Traceback" not in message
    for line, value, fix in ((5, "stepz", "steps"), (6, "eight", "integer"), (7, '"False"', "false")):
        [mistake] = [part for part in message.split("\n\n") if f"bad.yaml:{line}," in part]
        assert value in mistake
        assert fix in mistake[mistake.index("fix:") :]


def test_the_definitions_of_a_valid_recipe_validate(fresh) -> None:
    process = fresh.dagster("definitions", "validate", "-m", "assets.definitions")
    assert process.returncode == 0, process.stderr
