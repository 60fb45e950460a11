"""The wheel, in an environment without the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE_PACKAGES = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")

FOREIGN = """
import importlib.util, sys
from pathlib import Path
repository = Path(sys.argv[1])
print([path for path in sys.path if Path(path) == repository])
for name in ("pipeline", "assets", "resources", "launchers"):
    print(importlib.util.find_spec(name).origin)
"""
"""Prints where the project's packages come from."""


def run(*command: str | Path, cwd: Path) -> str:
    removed = ("PYTHONPATH", "DAGSTER_HOME", "LATENTLINE_CONFIGS", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    completed = subprocess.run(
        [str(each) for each in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
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


def install(wheel: Path, environment: Path) -> Path:
    """Install the wheel next to this environment's dependencies, and return the folder of programs."""
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=wheel.parent)
    packages = environment / SITE_PACKAGES
    for each in (Path(sys.prefix) / SITE_PACKAGES).iterdir():
        # The checkout itself is installed here as editable.
        if "latentline" not in each.name and not (packages / each.name).exists():
            (packages / each.name).symlink_to(each)
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", "--quiet", wheel, cwd=wheel.parent)
    return environment / "bin"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_installed_wheel_trains_in_a_folder_that_init_wrote(tmp_path: Path, photos: Path) -> None:
    programs = install(build_wheel(tmp_path), tmp_path / "environment")
    repository, *origins = run(programs / "python", "-c", FOREIGN, ROOT, cwd=tmp_path).splitlines()
    assert repository == "[]"
    assert len(origins) == 4
    assert all(Path(each).is_relative_to(tmp_path / "environment") for each in origins)

    folder = tmp_path / "project"
    latentline = programs / "latentline"
    run(latentline, "init", folder, cwd=tmp_path)
    shutil.copytree(ROOT / "demo" / "base", folder / "models" / "base")
    shutil.copytree(photos, folder / "data" / "flowers")
    options = ("--base", folder / "models" / "base", "--steps", "2", "--resolution", "64")
    run(latentline, "new", "flowers", "--images", "data/flowers", *options, cwd=folder)
    recipe = folder / "configs" / "flowers.yaml"
    assert str(ROOT) not in recipe.read_text("utf-8")
    run(latentline, "validate", "flowers", cwd=folder)
    run(latentline, "run", "flowers", cwd=folder)
    assert list((folder / "outputs" / "flowers" / "lora").glob("*.safetensors"))
    assert (folder / ".dagster" / "history").is_dir()
    assert not (tmp_path / "environment" / SITE_PACKAGES / "outputs").exists()

    # Dagster's own command finds the same project, and computes nothing again.
    dagster = ("env", f"DAGSTER_HOME={folder / '.dagster'}", programs / "python", "-m", "dagster")
    run(*dagster, "job", "execute", "-m", "assets.definitions", "-j", "flowers_train", cwd=folder)
    assert len(list((folder / "outputs" / "flowers" / "runs").iterdir())) == 1
