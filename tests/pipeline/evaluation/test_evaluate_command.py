"""`latentline evaluate` on a trained run of a tiny model: its results, and damage to each."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from safetensors.numpy import load_file, save_file

from pipeline.cache.recipe_entries import STAT_COLUMNS
from pipeline.encoding.workers import EVALUATION_MODULE
from pipeline.errors import LatentlineError, RecipeError
from pipeline.evaluation.known_entries import FILE
from pipeline.log import discard
from pipeline.maintenance import verify
from pipeline.storage.checked_json import write_checked
from pipeline.storage.tables import SCHEMAS, Tables
from tests.damage import DAMAGES
from tests.pipeline.evaluation.command import Command, command
from tests.pipeline.evaluation.evaluated import PROMPTS
from tests.pipeline.trained_lora.runs import run_folders

__all__ = ["command"]

RESULTS = (
    "tables/evaluation.parquet",
    FILE,
    "reports/evaluation.json",
    "reports/evaluation_checks.json",
    "reports/evaluation/curves.png",
    "reports/evaluation/grid.jpg",
)
"""Files in the output folder that an evaluation writes."""


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the pictures and features of the first evaluation, which later ones do not draw again."""
    return tmp_path_factory.mktemp("entries")


@pytest.fixture
def evaluated(command: Command, entries: Path) -> Command:
    """The commands of a project that has been evaluated."""
    shutil.copytree(entries, command.cache, dirs_exist_ok=True)
    command.evaluate()
    for kind in ("pictures", "features"):
        shutil.copytree(command.cache / kind, entries / kind, dirs_exist_ok=True)
    return command


def change_lora(command: Command, step: int) -> None:
    """Make the LoRA of a step another one, as a training with other weights would save it."""
    folder = run_folders(command.project)[0] / "checkpoints" / f"step-{step:08d}"
    file = folder / "pytorch_lora_weights.safetensors"
    save_file({name: 2 * value for name, value in load_file(file).items()}, file)
    record = json.loads((folder / "lora.json").read_text())
    record["sha256"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    write_checked(folder / "lora.json", record)


def files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_the_command_writes_its_results_and_a_second_one_launches_nothing(command: Command) -> None:
    shown = command.evaluate()
    assert command.modules == [EVALUATION_MODULE] * 2, "pictures, then features"
    lines = shown.stdout.splitlines()
    assert lines[0].split() == ["step", "strength", "learned", "obeys", "drift", "copies"]
    assert [line.split()[:2] for line in lines[1:3]] == [["2", "1"], ["4", "1"]]
    assert f"pictures and report: {command.output / 'reports' / 'evaluation'}" in lines
    report = command.report()
    assert report["why"] in lines
    assert (report["recipe"], report["run"]) == ("demo", run_folders(command.project)[0].name)
    assert f"obeys is not measured: {report['absent']['obeys']}" in lines
    assert all((command.output / name).is_file() for name in RESULTS)
    table = pl.read_parquet(command.output / "tables/evaluation.parquet")
    assert dict(table.schema) == SCHEMAS["evaluation"]
    checks = command.report("evaluation_checks")["checks"]
    warnings = {f"warning: {each['name']}: {each['summary']}" for each in checks if not each["passed"]}
    assert warnings
    assert all(any(line.startswith(warning) for line in shown.stderr.splitlines()) for warning in warnings)

    before, result = files(command.output), command.result()
    assert command.evaluate().stdout == shown.stdout
    assert command.modules == []
    assert command.result() == result
    after = files(command.output)
    assert {name for name in after if after[name] != before.get(name)} == {"reports/evaluation.json"}


def test_one_step_is_drawn_alone_if_only_that_step_is_new_or_has_changed(command: Command) -> None:
    command.evaluate("--step", "2")
    assert [each["step"] for each in command.report()["steps"]] == [2]
    command.evaluate()
    # Two prompts by step 4; the base model's pictures and those of step 2 exist.
    assert (command.report()["pictures_encoded"], command.report()["pictures_reused"]) == (2, 4)
    change_lora(command, 4)
    command.evaluate()
    assert (command.report()["pictures_encoded"], command.report()["pictures_reused"]) == (2, 4)
    assert command.report()["features_encoded"] == 2


@pytest.mark.parametrize("kind", ["pictures", "features"])
def test_damaged_entries_are_computed_again_and_give_the_same_result(evaluated: Command, kind: str) -> None:
    result = evaluated.result()
    entries = sorted((evaluated.cache / kind).rglob("*.safetensors"))
    sound = [entry.read_bytes() for entry in entries]
    damages = [*DAMAGES.values(), Path.unlink, lambda path: path.write_bytes(sound[-1])]
    for entry, damage in zip(entries, damages, strict=False):
        damage(entry)
    assert len(entries) >= len(damages)

    evaluated.evaluate()
    assert [entry.read_bytes() for entry in entries] == sound
    assert evaluated.result() == result
    assert evaluated.report()[f"{kind}_encoded"] >= len(damages) - 1


@pytest.mark.parametrize("way", [*DAMAGES, "unlink"])
def test_damaged_results_are_written_again_without_drawing(evaluated: Command, way: str) -> None:
    sound, result = files(evaluated.output), evaluated.result()
    for name in RESULTS:
        {**DAMAGES, "unlink": Path.unlink}[way](evaluated.output / name)
    evaluated.evaluate()
    assert evaluated.modules == []
    assert evaluated.result() == result
    after = files(evaluated.output)
    assert {name for name in {*sound, *after} if after.get(name) != sound.get(name)} == {
        "reports/evaluation.json"  # pictures are reused, not drawn
    }


@pytest.mark.parametrize("kind", ["pictures", "features"])
def test_the_fix_of_an_entry_that_rotted_without_a_trace_works(evaluated: Command, kind: str) -> None:
    """Bit rot changes no stat, so an entry is trusted until it is read."""
    result, known = evaluated.result(), pl.read_parquet(evaluated.output / FILE)
    # The grid shows the pictures of the last step.
    key = pl.read_parquet(evaluated.output / "tables/evaluation.parquet").filter(step=4)["picture"][0]
    keys = known.filter(kind=kind)["key"] if kind == "features" else [key]
    (entry,) = (evaluated.cache / kind).rglob(f"{keys[0]}.safetensors")
    DAMAGES["flip"](entry)
    stat = entry.stat()
    values = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
    known.with_columns(
        pl.when(pl.col("key") == entry.stem).then(pl.lit(value)).otherwise(name).alias(name)
        for name, value in zip(STAT_COLUMNS, values, strict=True)
    ).write_parquet(evaluated.output / FILE)

    refused = evaluated("evaluate").exception
    assert isinstance(refused, LatentlineError)
    assert str(entry) in refused.where
    assert "latentline verify <recipe> --repair" in refused.fix
    recipe = evaluated.recipe()
    tables = Tables(recipe.output_dir)
    # Without the latents, which the project's training did not need.
    needed = [each for each in verify.needed_entries(recipe, tables) if each.spec.kind in (kind, "text")]
    (bad,) = verify.verify(recipe, needed, log=discard)
    verify.repair(recipe, tables, [bad], log=discard)
    evaluated.evaluate()
    assert evaluated.result() == result


def test_a_prompt_set_has_results_of_its_own_and_leaves_the_evaluation_as_it_is(
    evaluated: Command, tmp_path: Path
) -> None:
    before = files(evaluated.output)
    prompts = [{"prompt": "a green cat", "role": "concept", "steps": 2}, PROMPTS[1]]
    file = tmp_path / "cats.yaml"
    file.write_text(json.dumps({"prompts": prompts}), encoding="utf-8")
    shown = evaluated.evaluate("--prompt-set", str(file))
    folder = evaluated.output / "reports" / "prompt_sets" / "cats"
    assert f"pictures and report: {folder}" in shown.stdout
    names = {"curves.png", "evaluation.json", "evaluation.parquet", "grid.jpg"}
    assert files(folder).keys() == names
    report = json.loads((folder / "evaluation.json").read_text())
    assert report["pictures_encoded"] == 3, "the base model and two steps draw one prompt that is new"
    assert set(pl.read_parquet(folder / "evaluation.parquet")["prompt"]) == {"a green cat", "a blue rocket"}
    after = files(evaluated.output)
    assert {name for name in before if after[name] != before[name]} == {FILE}

    evaluated.evaluate("--prompt-set", str(file))
    assert evaluated.modules == []
    evaluated.evaluate()
    assert evaluated.modules == []


@pytest.mark.parametrize(
    ("name", "text", "what", "where"),
    [
        ("cats", "prompts: [a cat]", "a prompt of the evaluation must have a role", ":1, prompts[0]"),
        ("cats", "prompts: auto", "the prompts of a prompt set must be a list, got auto", ":1, prompts"),
        ("cats", "role: base", "prompts", ""),
        ("cats", "", "the prompt set is empty", "cats.yaml"),
        ("my cats", "", "the name of a prompt set must contain only letters, digits and _", "my cats.yaml"),
        (
            "cats",
            "prompts:\n- {prompt: a cat, role: base}\n- {prompt: a cat, role: base}",
            "prompts of one role must differ",
            ":3, prompts[1]",
        ),
        (
            "cats",
            "prompts:\n- {prompt: a cat, role: base, height: 33, width: 64}",
            "height and width must be multiples of 8",
            "cats.yaml",
        ),
    ],
)
def test_a_mistake_in_a_prompt_set_names_its_file(
    command: Command, tmp_path: Path, name: str, text: str, what: str, where: str
) -> None:
    file = tmp_path / f"{name}.yaml"
    file.write_text(text, encoding="utf-8")
    error: Any = command("evaluate", "--prompt-set", str(file)).exception
    assert isinstance(error, RecipeError)
    assert what in error.what
    assert where in error.where
    assert name in error.where
    assert command.modules == []
