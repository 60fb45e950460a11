"""The command line: errors, hints and help of all commands."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from PIL import Image

from pipeline.cli.main import COMMANDS
from pipeline.recipe import project_root
from pipeline.recipe.deployment import read_deployment
from tests import command_line
from tests.command_line import Completed

MAIN = "from pipeline.cli.main import main; main()"

RECIPE = """\
datasets: [{{name: photos, path: {root}/photos}}]
cache_dir: {root}/{cache}
output_dir: {root}/out
model: {{base: {base}}}
"""


def latentline(*arguments: str, configs: Path) -> Completed:
    return command_line.latentline(*arguments, LATENTLINE_CONFIGS=str(configs))


def write(folder: Path, cache: str = "cache", base: str = "a/b", name: str = "flowers.yaml") -> Path:
    (folder / "photos").mkdir(exist_ok=True)
    file = folder / name
    file.write_text(RECIPE.format(root=folder, cache=cache, base=base), encoding="utf-8")
    return file


def test_a_missing_recipe_error_suggests_existing_recipes(tmp_path: Path) -> None:
    write(tmp_path)
    for argument, fix in {
        "flower": "did you mean flowers?",
        str(tmp_path / "flowrs.yaml"): "did you mean flowers?",
        "birds": "use one of flowers",
        str(tmp_path / "none" / "birds.yaml"): "pass the path of a recipe file",
    }.items():
        completed = latentline("plan", argument, configs=tmp_path)
        assert completed.returncode == 1
        assert completed.stderr.startswith(f"RecipeError: the recipe {argument} does not exist\n")
        assert completed.stderr.endswith(f"fix:   {fix}\n")


def test_validate_prints_the_deployment_with_its_defaults_as_an_equivalent_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "site.yaml"
    file.write_text("launcher: {kind: slurm, options: [--partition=gpu]}\n", encoding="utf-8")
    monkeypatch.setenv("LATENTLINE_DEPLOYMENT", str(file))
    completed = latentline("validate", "--deployment", configs=tmp_path)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert completed.stdout.startswith(f"# {file}\nexecutor: in_process\n")
    expected = read_deployment(file)
    file.write_text(completed.stdout, encoding="utf-8")
    assert read_deployment(file) == expected


def test_a_recipe_is_given_by_name_or_by_file(tmp_path: Path) -> None:
    file = write(tmp_path)
    for argument in ("flowers", str(file)):
        completed = latentline("validate", argument, configs=tmp_path)
        assert (completed.returncode, completed.stderr) == (0, "")
        assert str(file) in completed.stdout


def test_an_error_shows_what_where_and_fix_without_a_traceback(tmp_path: Path) -> None:
    write(tmp_path, cache="photos/cache")
    completed = latentline("validate", "flowers", configs=tmp_path)
    assert completed.returncode == 1
    assert completed.stderr.startswith("PathIsolationError: ")
    assert "fix:" in completed.stderr
    assert "Traceback" not in completed.stderr


def test_a_file_access_error_shows_its_path_and_a_fix(tmp_path: Path) -> None:
    file = write(tmp_path)
    for edge in (400, 500, 600):
        Image.new("RGB", (edge, 512)).save(tmp_path / "photos" / f"{edge}.png")
    before = file.read_bytes()
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"
    completed = subprocess.run(
        [sys.executable, "-c", f"{limited}; {MAIN}", "fit-buckets", str(file), "--write", "3"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 1
    assert f"FileAccessError: File too large (EFBIG)\n  where: {file}\n  fix:" in completed.stderr
    assert "Traceback" not in completed.stderr
    assert file.read_bytes() == before


def test_a_missing_recipe_is_an_error(tmp_path: Path) -> None:
    completed = latentline("validate", "roses", configs=tmp_path)
    assert completed.returncode == 1
    assert "roses.yaml" in completed.stderr
    assert "fix:" in completed.stderr


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("{root}/photos", "lacks model_index.json"),
        ("{root}/none.safetensors", "has the name of a file and does not exist"),
        ("{root}/flowers.yaml", "is a file"),
        ("./none", "does not exist"),
    ],
)
def test_validate_checks_a_local_base_model(tmp_path: Path, base: str, message: str) -> None:
    write(tmp_path, base=base.format(root=tmp_path))
    completed = latentline("validate", "flowers", configs=tmp_path)
    assert completed.returncode == 1
    assert message in completed.stderr.splitlines()[0]
    assert "fix:" in completed.stderr


def test_validate_checks_that_the_datasets_exist_and_suggests_the_closest_folder(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "photos").rename(tmp_path / "fotos")
    completed = latentline("validate", "flowers", configs=tmp_path)
    assert completed.stderr.startswith("DatasetError: the dataset cannot be read")
    assert f"did you mean {tmp_path}/fotos? Otherwise correct datasets[].path" in completed.stderr


def test_validate_finds_a_missing_folder_of_masks_and_of_references(tmp_path: Path) -> None:
    file = write(tmp_path)
    (tmp_path / "masks").mkdir()
    text = file.read_text("utf-8")
    for section, key in {
        "mask: {{path: {root}/maskz}}": "mask.path",
        "references: [{{path: {root}/masks}}, {{path: {root}/gone}}]": "references[1].path",
    }.items():
        file.write_text(text.replace("photos}]", f"photos, {section.format(root=tmp_path)}}}]"), "utf-8")
        completed = latentline("validate", "flowers", configs=tmp_path)
        assert completed.returncode == 1
        assert completed.stderr.startswith(f"DatasetError: the folder in datasets[].{key} cannot be read")
        assert f"correct datasets[].{key} in the recipe" in completed.stderr


def test_wrong_usage_suggests_a_command_or_a_recipe(tmp_path: Path) -> None:
    write(tmp_path)
    for arguments, hint in {
        ("validat",): "No such command 'validat'. Did you mean validate?",
        ("frobnicate",): "Use one of init, new, validate, ",
        ("validate",): "Missing argument 'RECIPE'. Use one of flowers.",
    }.items():
        completed = latentline(*arguments, configs=tmp_path)
        assert completed.returncode == 2
        assert hint in completed.stderr


def test_provenance_of_a_recipe_that_was_not_trained_names_its_output_folder(tmp_path: Path) -> None:
    write(tmp_path)
    completed = latentline("provenance", "flowers", configs=tmp_path)
    assert completed.returncode == 1
    assert f"where: {tmp_path}/out" in completed.stderr
    assert "pass the name of a recipe, " in latentline("provenance", "none", configs=tmp_path).stderr


def test_the_version_is_the_installed_one(tmp_path: Path) -> None:
    completed = latentline("--version", configs=tmp_path)
    assert completed.stdout == f"latentline, version {version('latentline')}\n"


def test_fixes_can_be_copied_and_name_what_exists(tmp_path: Path) -> None:
    write(tmp_path)
    run = tmp_path / "out" / "runs" / "0123456789abcdef"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    for arguments, fix in {
        ("export", "flowers", "--run", "abc"): "choose one of 0123456789abcdef",
        ("new", "my roses", "--images", "My Pics", "--base", "a/b"): (
            "latentline new my_roses --images 'My Pics' --base a/b"
        ),
        ("convert-checkpoint", "none", "out"): "pass the path of a model in one .safetensors file",
    }.items():
        completed = latentline(*arguments, configs=tmp_path)
        assert completed.returncode == 1
        assert completed.stderr.endswith(f"fix:   {fix}\n")


def test_the_help_shows_one_complete_line_per_command(tmp_path: Path) -> None:
    _, _, commands = latentline("--help", configs=tmp_path).stdout.partition("Commands:\n")
    assert len(commands.splitlines()) == len(COMMANDS)
    assert "..." not in commands


def test_validate_finds_another_recipe_with_the_same_output_folder(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, name="asters.yaml")
    (tmp_path / "broken.yaml").write_text("datasets: 1", "utf-8")
    completed = latentline("validate", "flowers", configs=tmp_path)
    reported = [line.split(":")[1] for line in completed.stderr.splitlines() if line.startswith("warning")]
    assert reported == [" recipe asters is excluded", " recipe broken is excluded"]
    assert "\nRecipeError: recipe asters has the same output_dir" in completed.stderr
    assert completed.stderr.count("RecipeError: ") == 1


def test_O15_validate_accepts_the_original_and_lists_all_mistakes_of_its_copy(tmp_path: Path) -> None:
    original = write(tmp_path)
    text = original.read_text("utf-8").replace(f"{tmp_path}/out", f"{tmp_path}/flowers")
    original.write_text(text, encoding="utf-8")
    write(tmp_path, name="copy.yaml", base="./none")
    copy = tmp_path / "copy.yaml"
    wrong = text.replace("a/b", "./none").replace(f"{tmp_path}/photos", f"{tmp_path}/fotoz")
    copy.write_text(f"{wrong}training: {{lora: {{start_from: {tmp_path}/gone.safetensors}}}}\n", "utf-8")

    completed = latentline("validate", "flowers", configs=tmp_path)
    assert completed.returncode == 0, completed.stderr
    assert completed.stderr.startswith("warning: recipe copy is excluded: output_dir ")

    completed = latentline("validate", "copy", configs=tmp_path)
    assert completed.returncode == 1
    assert completed.stderr.startswith(f"RecipeError: 4 mistakes in {copy}\n")
    for what in ("belongs to recipe flowers", "./none does not exist", "gone.safetensors", "fotoz"):
        assert what in completed.stderr
    assert completed.stderr.endswith("fix:   apply the 4 fixes above\n")


@pytest.mark.parametrize("arguments", [("gc",), ("validate", "flowers")], ids=" ".join)
def test_a_command_works_next_to_a_broken_recipe_and_reports_it_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    write(tmp_path)
    broken = tmp_path / "broken.yaml"
    broken.write_text("datasets: 1\nmodel: {base: 7}", "utf-8")
    completed = latentline(*arguments, configs=tmp_path)
    assert completed.returncode == 0, completed.stderr
    [line] = completed.stderr.splitlines()
    assert line.startswith(f"warning: recipe broken is excluded: 3 mistakes in {broken}; ")
    assert f"latentline validate {broken}" in line


def test_validate_rejects_a_file_name_that_dagster_would_not_load(tmp_path: Path) -> None:
    file = write(tmp_path, name="flowers.yml")
    completed = latentline("validate", str(file), configs=tmp_path)
    assert "rename it to flowers.yaml" in completed.stderr


@pytest.mark.parametrize("arguments", [("explain", "flowers", "cat"), ("verify", "flowers")], ids=" ".join)
def test_a_message_about_a_job_names_the_recipe_s_own_job(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    write(tmp_path, base=str(tmp_path))
    completed = latentline(*arguments, configs=tmp_path)
    assert completed.returncode == 1
    assert "latentline run flowers --cache-only" in completed.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, tmp_path: Path) -> None:
    completed = latentline(name, "--help", configs=tmp_path)
    assert completed.returncode == 0
    assert "Usage: latentline" in completed.stdout


WITH_STREAMS = """
import os, sys
from pathlib import Path
from pipeline.cli.main import main

file = Path(sys.argv.pop())
try:
    main()
finally:
    file.write_text("\\n".join(os.readlink(f"/proc/self/fd/{number}") for number in range(3)))
"""
"""Runs a command, and writes what its standard streams are at its end."""


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_no_file_takes_the_place_of_a_closed_stream(tmp_path: Path, closed: str) -> None:
    write(tmp_path)
    names = tmp_path / "names"
    arguments = [sys.executable, "-c", WITH_STREAMS, "validate", "flowers", str(names)]
    completed = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LATENTLINE_CONFIGS": str(tmp_path)},
    )
    assert (completed.returncode, completed.stderr) == (0, "")
    assert names.read_text().splitlines()[1] == "/dev/null"
    assert not [name for name in names.read_text().splitlines() if name.startswith(str(tmp_path))]


@pytest.mark.parametrize("name", ["\x1b[2J", "\x9b2J", "\u202egnp"])
def test_the_traceback_of_a_bug_has_escapes(tmp_path: Path, name: str) -> None:
    (tmp_path / "broken.py").write_text(
        "import click\n\n@click.command()\ndef command():\n"
        f"    raise ValueError({name!r} + ' sftp://me:pass@host')\n",
        encoding="utf-8",
    )
    code = "import pipeline.cli.main as cli; cli.COMMANDS['new'] = 'broken'; cli.main()"
    process = subprocess.run(
        [sys.executable, "-c", code, "new"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{project_root()}", "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1
    assert f"ValueError: {name.encode('unicode_escape').decode()} sftp://***@host" in process.stderr
    assert name not in process.stderr
