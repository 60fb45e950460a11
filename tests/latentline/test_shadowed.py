"""The command `latentline` where another project's packages have the names of Latentline's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import latentline

ROOT = Path(__file__).resolve().parents[2]


def run(*folders: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `latentline --version` with `folders` in front of the environment's packages."""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    # -P leaves out the working directory, as for the installed script.
    command = (sys.executable, "-P", "-m", "latentline", "--version")
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("file", ["pipeline/__init__.py", "assets/definitions.py", "resources.py"])
def test_O19_a_foreign_package_is_named_with_its_folder_and_a_fix(tmp_path: Path, file: str) -> None:
    foreign = tmp_path / file
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("raise SystemExit('imported')\n", "utf-8")
    if foreign.name == "definitions.py":
        # Python prefers a package anywhere in the path to a folder without this file.
        (foreign.parent / "__init__.py").touch()
    completed = run(tmp_path, ROOT, cwd=tmp_path)
    assert (completed.returncode, completed.stdout) == (2, "")

    name = Path(file).parts[0].removesuffix(".py")
    place = foreign if foreign.parent == tmp_path else foreign.parent
    assert completed.stderr == (
        f"Error: packages of another project shadow Latentline's: {name}\n"
        f"  where: Python finds {name} at {place} instead of {ROOT / name}\n"
        "  fix:   install Latentline into an environment of its own, or unset PYTHONPATH\n"
    )


def test_a_checkout_in_front_of_the_installed_packages_is_used_as_a_whole(tmp_path: Path) -> None:
    link = tmp_path / "checkout"
    link.symlink_to(ROOT)
    completed = run(link, cwd=tmp_path)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert completed.stdout.split()[-1] == latentline.__version__


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("resources/old_dagster_runs.py", ["gc", "--dagster-runs", "1"]),
        pytest.param("assets/run.py", ["run", "flowers.yaml"], marks=pytest.mark.slow),
    ],
)
def test_O19_modules_in_the_working_directory_are_not_executed(
    tmp_path: Path, module: str, arguments: list[str]
) -> None:
    example = ROOT / "configs" / "examples" / "flowers_sd15.yaml"
    (tmp_path / "flowers.yaml").write_text(example.read_text("utf-8"), "utf-8")
    (tmp_path / "home").mkdir()
    foreign = tmp_path / module
    foreign.parent.mkdir()
    (foreign.parent / "__init__.py").touch()
    foreign.write_text("raise SystemExit('imported')\n", "utf-8")
    program = str(Path(sys.executable).parent / "latentline")
    variables = os.environ | {"DAGSTER_HOME": str(tmp_path / "home")}
    variables.pop("PYTHONPATH", None)
    completed = subprocess.run(
        [program, *arguments], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    assert "imported" not in completed.stderr
