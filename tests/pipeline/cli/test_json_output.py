"""`--json` of all commands: one document on standard output, also of an error, and the same exit status."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest

from pipeline.cli.main import COMMANDS, latentline
from pipeline.recipe import project_root
from tests import command_line
from tests.command_line import Completed, latentline_command
from tests.pipeline.cached_job import Job

Call = Callable[..., Completed]


def leaves() -> list[list[str]]:
    """Return the names of all commands, such as `["plan"]` or `["lora", "info"]`."""
    context = click.Context(latentline)
    names: list[list[str]] = []
    for name in COMMANDS:
        command = latentline.get_command(context, name)
        subcommands = command.list_commands(context) if isinstance(command, click.Group) else [None]
        names += [[name] if each is None else [name, each] for each in subcommands]
    return names


def document(completed: Completed) -> dict[str, Any]:
    return json.loads(completed.stdout)


@pytest.fixture
def call(job: Job, tmp_path: Path) -> Call:
    configs = tmp_path / "configs"
    configs.mkdir()
    text = f"""\
datasets: [{{name: photos, path: {tmp_path}/photos}}]
cache_dir: {tmp_path}/cache
output_dir: {tmp_path}/out
model: {{base: {job.recipe.model.base}}}
buckets: {{resolution: 64, step: 16}}
"""
    (configs / "sample.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "home").mkdir()
    variables = {"LATENTLINE_CONFIGS": str(configs), "DAGSTER_HOME": str(tmp_path / "home")}
    return lambda *arguments: command_line.latentline(*map(str, arguments), **variables)


@pytest.mark.parametrize("name", leaves(), ids=" ".join)
def test_every_command_has_json_and_gives_wrong_usage_as_one_document(name: list[str]) -> None:
    completed = command_line.latentline(*name, "--json", "--no-such-option")
    assert completed.returncode == 2
    error = document(completed)["error"]
    assert error == {
        "type": "NoSuchOption",
        "what": "No such option '--no-such-option'.",
        "where": f"latentline {' '.join(name)}",
        "fix": f"see latentline {' '.join(name)} --help",
    }
    assert "No such option" in completed.stderr


@pytest.mark.parametrize("module", COMMANDS.values())
def test_every_command_gives_a_result(module: str) -> None:
    """Tests below and of other files run commands; this finds new ones."""
    source = inspect.getsource(import_module(module))
    assert "give(" in source or "run_stage(" in source


def test_wrong_usage_before_a_command_is_one_document() -> None:
    for arguments, where in {
        ("frobnicate", "--json"): "latentline",
        ("--frobnicate", "--json"): "latentline",
        ("plan", "--json"): "latentline plan",
    }.items():
        completed = command_line.latentline(*arguments)
        assert completed.returncode == 2
        assert document(completed)["error"]["where"] == where


def test_an_error_has_its_class_what_where_and_fix(call: Call) -> None:
    completed = call("validate", "sampel", "--json")
    assert completed.returncode == 1
    error = document(completed)["error"]
    assert error["type"] == "RecipeError"
    assert error["what"] == "the recipe sampel does not exist"
    assert error["where"].endswith("/configs/sampel.yaml")
    assert error["fix"] == "did you mean sample?"
    # A person who watches reads the same.
    assert f"  fix:   {error['fix']}\n" in completed.stderr


def test_a_document_follows_the_two_dashes_only_as_a_name() -> None:
    completed = command_line.latentline("validate", "--", "--json")
    assert (completed.returncode, completed.stdout) == (1, "")


def test_help_is_for_people(call: Call) -> None:
    completed = call("plan", "--json", "--help")
    assert completed.returncode == 0
    assert "Usage: latentline plan" in completed.stderr + completed.stdout


@pytest.mark.parametrize("kind", ["bug", "stop", "secret"])
def test_a_command_that_ends_without_a_result_gives_an_error(tmp_path: Path, kind: str) -> None:
    raised = {
        "bug": "ValueError('sftp://me:pass@host')",
        "stop": "SystemExit(130)",
        "secret": "FileAccessError('no s3://me:pass@host', where='s3://me:pass@host', fix='<recipe>')",
    }[kind]
    (tmp_path / "broken.py").write_text(
        "import click\nfrom pipeline.errors import FileAccessError\n\n@click.command()\ndef command():\n"
        f"    click.echo('a line')\n    raise {raised}\n",
        encoding="utf-8",
    )
    code = "import pipeline.cli.main as cli; cli.COMMANDS['new'] = 'broken'; cli.main()"
    process = subprocess.run(
        [sys.executable, "-c", code, "new", "--json"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{project_root()}"},
        capture_output=True,
        text=True,
        check=False,
    )
    error = json.loads(process.stdout)["error"]
    status, name = {
        "bug": (1, "ValueError"),
        "stop": (130, "StoppedError"),
        "secret": (1, "FileAccessError"),
    }[kind]
    assert (process.returncode, error["type"]) == (status, name)
    assert {"what", "where", "fix"} < error.keys()
    assert "a line\n" in process.stderr
    assert "pass" not in process.stdout


def test_commands_about_a_recipe_give_their_result_as_one_document(call: Call, tmp_path: Path) -> None:
    for arguments, keys in {
        ("validate", "sample"): {"recipe", "file", "datasets", "output_dir", "warnings"},
        ("validate", "--deployment"): {"deployment"},
        ("plan", "sample", "--no-memory"): {"closed", "warnings", "latents_to_make", "training", "memory"},
        ("explain", "sample", "cat.png"): {"sample_id", "raw_images", "latents entry"},
        ("verify", "sample"): {"recipe", "entries", "bytes", "bad", "damaged_packs"},
        ("pack", "sample"): {"recipe", "needed", "num_packs", "num_entries", "unusable"},
        ("fit-buckets", "sample", "--step", "16"): {"recipe", "images", "current", "fitted"},
        ("gc",): {"caches"},
        ("gc", "sample", "--keep-runs", "1"): {"outputs"},
        ("init", tmp_path / "project"): {"folder", "files"},
        ("new", "copy", "--from", "sample"): {"recipe", "file", "copied_from", "settings"},
        ("new", "more", "--images", tmp_path / "photos", "--base", "a/b"): {"images", "remarks", "warnings"},
    }.items():
        completed = call(*arguments, "--json")
        assert completed.returncode == 0, completed.stderr
        assert keys <= document(completed).keys(), arguments


def test_the_lines_of_a_command_are_on_standard_error(call: Call) -> None:
    without, with_json = call("verify", "sample"), call("verify", "sample", "--json")
    assert without.stdout
    assert without.stdout in with_json.stderr


def test_bad_entries_are_named_and_the_status_is_1(call: Call, job: Job) -> None:
    job.entry("vae_latents").unlink()
    completed = call("verify", "sample", "--json")
    assert completed.returncode == 1
    [bad] = document(completed)["bad"]
    assert bad["problem"] == "the entry is missing"
    repaired = call("verify", "sample", "--repair", "--json")
    assert (repaired.returncode, document(repaired)["still_bad"]) == (0, [])


def test_a_closed_gate_of_a_plan_is_a_result_and_the_status_is_1(call: Call, tmp_path: Path) -> None:
    (tmp_path / "photos" / "new.png").write_bytes(b"no image")
    completed = call("plan", "sample", "--no-memory", "--json")
    assert completed.returncode == 1
    assert all(gate["fix"] for gate in document(completed)["closed"])


def test_old_runs_of_dagster_are_a_document_of_their_own_process(tmp_path: Path) -> None:
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n", encoding="utf-8")
    process = subprocess.run(
        latentline_command("gc", "--dagster-runs", "1", "--json"),
        env={**os.environ, "DAGSTER_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == {"dagster_runs": [], "deleted": None}
    assert "0 old runs" in process.stderr
