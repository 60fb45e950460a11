"""The batch scripts for Slurm."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pipeline.cli.main import COMMANDS, latentline

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SCRIPTS = {"train.sbatch": "train", "encode.sbatch": "encode"}

SRUN = """#!/bin/sh
for word in "$@"; do echo "$word"; done
"""
"""Prints its arguments; a substitute for the program of a cluster."""


@pytest.mark.parametrize(("name", "command"), SCRIPTS.items())
def test_a_script_runs_its_command_once_per_task(name: str, command: str, tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text(SRUN, encoding="utf-8")
    srun.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SLURM_CPUS_PER_TASK": "8"}
    script = ["bash", str(DEPLOY / name), "s3://bucket/an order"]
    completed = subprocess.run(script, env=environment, capture_output=True, text=True, check=True)
    arguments = completed.stdout.splitlines()
    assert arguments[-3:] == [".venv/bin/latentline", command, "s3://bucket/an order"]
    assert [word for word in arguments[:-3] if not word.startswith("--")] == []

    without_order = subprocess.run(script[:2], env=environment, capture_output=True, text=True, check=False)
    assert without_order.returncode != 0
    assert (
        f"usage: sbatch {'' if command == 'train' else '--array=0-7 '}deploy/{name}" in without_order.stderr
    )


@pytest.mark.parametrize(("name", "command"), SCRIPTS.items())
def test_the_command_of_a_script_exists(name: str, command: str) -> None:
    if command not in COMMANDS:
        pytest.skip(f"`latentline {command}` is not part of this version")
    (argument,) = (
        parameter
        for parameter in latentline.get_command(None, command).params  # type: ignore[arg-type]
        if parameter.param_type_name == "argument"
    )
    assert argument.name == {"train": "job", "encode": "encoding"}[command]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_options_for_sbatch_come_before_the_first_command(name: str) -> None:
    lines = (DEPLOY / name).read_text(encoding="utf-8").splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH ")]
    first_command = next(number for number, line in enumerate(lines) if re.match(r"[a-z]", line))
    assert len(options) >= 8
    assert options[-1] < first_command


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs Debian's package shellcheck")
@pytest.mark.parametrize(
    "path", [*DEPLOY.glob("*.sbatch"), DEPLOY.parent / "tools" / "image_check.sh"], ids=str
)
def test_shellcheck_has_no_complaint(path: Path) -> None:
    completed = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True, check=False)
    assert completed.stdout == ""
