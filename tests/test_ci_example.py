"""The example workflow for users' repositories, and the run configuration for CI."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from dagster import validate_run_config
from ruamel.yaml import YAML

from assets.definitions import build_definitions
from pipeline.cli.main import COMMANDS, latentline
from pipeline.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW = ROOT / "configs" / "examples" / "ci" / "github-actions.yml"
RUN_CONFIG = ROOT / "configs" / "run" / "ci.yaml"


def loaded(path: Path) -> Any:
    return YAML(typ="safe").load(path)


def steps() -> list[dict[str, Any]]:
    return [step for job in loaded(WORKFLOW)["jobs"].values() for step in job["steps"]]


def commands() -> list[str]:
    lines = [line for step in steps() for line in step.get("run", "").splitlines()]
    return sorted({line.strip() for line in lines})


def test_the_workflow_has_the_keys_that_github_requires() -> None:
    workflow = loaded(WORKFLOW)
    assert set(workflow) == {"name", "on", "permissions", "concurrency", "env", "jobs"}
    for job in workflow["jobs"].values():
        assert {"runs-on", "timeout-minutes", "steps"} <= set(job)
    for step in steps():
        assert ("run" in step) != ("uses" in step)


def test_actions_are_pinned_by_commit_with_their_version_in_a_comment() -> None:
    lines = [line for line in WORKFLOW.read_text(encoding="utf-8").splitlines() if "uses:" in line]
    assert len(lines) == sum("uses" in step for step in steps())
    for line in lines:
        assert re.search(r"uses: actions/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line


def test_no_status_is_lost_in_a_pipe() -> None:
    assert [step for step in steps() if "|" in step.get("run", "").replace("|\n", "")] == []


@pytest.mark.parametrize("line", commands())
def test_each_command_exists(line: str) -> None:
    program, *arguments = shlex.split(line)
    if program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == ".venv/bin/latentline":
        name, *values = arguments
        assert name in COMMANDS
        command = latentline.get_command(None, name)  # type: ignore[arg-type]
        command.make_context(name, [value.replace("${RECIPE}", "demo") for value in values])
    elif arguments[:2] == ["job", "execute"]:
        assert program == ".venv/bin/dagster"
        assert arguments[2:4] == ["-m", "assets.definitions"]
        assert arguments[5] in {"${RECIPE}_cache", "${RECIPE}_train"}
        assert ROOT / arguments[7] == RUN_CONFIG
    else:
        assert [program, *arguments[:2]] == [".venv/bin/dagster", "definitions", "validate"]


@pytest.mark.parametrize("job", ["demo_cache", "demo_train"])
def test_the_run_configuration_fits_every_job(job: str) -> None:
    definitions = build_definitions([load_recipe(ROOT / "configs" / "demo.yaml")])
    resolved = validate_run_config(definitions.resolve_job_def(job), loaded(RUN_CONFIG))
    assert set(resolved["loggers"]) == {"terminal"}
