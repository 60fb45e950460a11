"""The wheel, in an environment without the repository."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import install_extra
from tests.e2e.daemon import running, until
from tests.free_ports import free_port
from tools.docs.browser import ended, graphql, launch, responds

ROOT = Path(__file__).resolve().parents[2]
SITE_PACKAGES = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")

FOREIGN = """
import importlib.util, sys
from pathlib import Path
repository = Path(sys.argv[1])
print([path for path in sys.path if Path(path) == repository])
for name in ("latentline", "pipeline", "assets", "resources", "launchers"):
    print(importlib.util.find_spec(name).origin)
"""
"""Prints where the project's packages come from."""


LOCATIONS = """{
  workspaceOrError { ... on Workspace { locationEntries { name locationOrLoadError { __typename } } } }
  instance { daemonHealth { allDaemonStatuses { daemonType required healthy } } }
}"""

WAIT_S = 300.0


def environment() -> dict[str, str]:
    """Return the variables of a person who has no checkout."""
    removed = ("PYTHONPATH", "DAGSTER_HOME", "LATENTLINE_CONFIGS", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in removed}


def run(*command: str | Path, cwd: Path) -> str:
    completed = subprocess.run(
        [str(each) for each in command],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def build_wheel(folder: Path) -> Path:
    """Build the wheel from the files that Git has, so that no earlier build adds any."""
    source = folder / "source"
    for name in run("git", "ls-files", "-z", cwd=ROOT).split("\0"):
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name, follow_symlinks=False)
        elif name and (ROOT / name).is_symlink():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).symlink_to((ROOT / name).readlink())
    options = ("--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", folder / "wheel")
    run(sys.executable, "-m", "pip", "wheel", source, *options, cwd=folder)
    (wheel,) = (folder / "wheel").glob("*.whl")
    shutil.rmtree(source)
    return wheel


def install(wheel: Path, target: Path) -> Path:
    """Install the wheel next to this environment's dependencies, and return the folder of programs."""
    run(sys.executable, "-m", "venv", "--without-pip", target, cwd=wheel.parent)
    packages = target / SITE_PACKAGES
    for each in (Path(sys.prefix) / SITE_PACKAGES).iterdir():
        # The checkout itself is installed here as editable.
        if "latentline" not in each.name and not (packages / each.name).exists():
            (packages / each.name).symlink_to(each)
    python = target / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", "--quiet", wheel, cwd=wheel.parent)
    return target / "bin"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_an_installed_wheel_trains_in_a_folder_that_init_wrote(tmp_path: Path, photos: Path) -> None:
    programs = install(build_wheel(tmp_path), tmp_path / "environment")
    repository, *origins = run(programs / "python", "-c", FOREIGN, ROOT, cwd=tmp_path).splitlines()
    assert repository == "[]"
    assert len(origins) == 5
    assert all(Path(each).is_relative_to(tmp_path / "environment") for each in origins)

    # Messages name extras, whose packages pip finds through the installed wheel.
    pip = (sys.executable, "-m", "pip", "--python", programs / "python")
    dry_run = run(
        *pip, "install", "--no-index", "--dry-run", *shlex.split(install_extra("k8s"))[2:], cwd=tmp_path
    )
    assert "latentline[k8s]" in dry_run

    folder = tmp_path / "project"
    latentline = programs / "latentline"
    run(latentline, "init", folder, cwd=tmp_path)
    shutil.copytree(ROOT / "demo" / "base", folder / "models" / "base")
    shutil.copytree(photos, folder / "data" / "flowers")
    options = ("--base", folder / "models" / "base", "--steps", "2", "--resolution", "64")
    run(latentline, "new", "flowers", "--images", "data/flowers", *options, cwd=folder)
    recipe = folder / "configs" / "flowers.yaml"
    text = recipe.read_text("utf-8")
    assert str(ROOT) not in text
    assert "num_processes: 1, mixed_precision: bf16" in text
    recipe.write_text(text.replace("num_processes: 1, mixed_precision: bf16", "num_processes: 2"), "utf-8")
    run(latentline, "validate", "flowers", cwd=folder)
    # Two processes train. Each of them must find the code and the project by itself.
    run(latentline, "run", "flowers", cwd=folder)
    assert list((folder / "outputs" / "flowers" / "lora").glob("*.safetensors"))
    assert (folder / ".dagster" / "history").is_dir()
    assert not (tmp_path / "environment" / SITE_PACKAGES / "outputs").exists()

    # Dagster's own commands find the same project, and compute nothing again.
    dagster = (f"{programs / 'python'}", "-m", "dagster")
    home = {"DAGSTER_HOME": str(folder / ".dagster")}
    execute = ("job", "execute", "-m", "assets.definitions", "-j", "flowers_train")
    run("env", f"DAGSTER_HOME={home['DAGSTER_HOME']}", *dagster, *execute, cwd=folder)
    run_from_the_ui(list(dagster), folder, environment=environment() | home, log=tmp_path / "dev.log")
    assert len(list((folder / "outputs" / "flowers" / "runs").iterdir())) == 1


def run_from_the_ui(dagster: list[str], folder: Path, *, environment: dict[str, str], log: Path) -> None:
    """Start the UI and the daemon as `latentline init` says, and a run of the recipe in it."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    with running([*dagster, "dev", "--port", str(port)], environment=environment, cwd=folder, log=log):
        until(lambda: responds(f"{url}/server_info"), "the UI", seconds=WAIT_S, log=log)
        run_id = launch(url, "flowers_train")
        # The daemon takes the run from the queue.
        until(lambda: ended(url, run_id), "the end of the run", seconds=WAIT_S, log=log)
        assert ended(url, run_id) == "SUCCESS", log.read_text("utf-8")[-3000:]

        state = graphql(url, LOCATIONS)
        assert state["workspaceOrError"]["locationEntries"] == [
            {"name": "latentline", "locationOrLoadError": {"__typename": "RepositoryLocation"}}
        ]
        daemons = state["instance"]["daemonHealth"]["allDaemonStatuses"]
        assert len(daemons) > 1
        assert [each for each in daemons if each["required"] and not each["healthy"]] == []
