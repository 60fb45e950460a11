"""The job of a user who can write only to some folders, with unusual paths, no locale and no home folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.e2e.daemon import make_home
from tests.e2e.workspace import Workspace, write_photographs

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534

SHOW_PYTHON = """
keep=$(mktemp -d) && mount --bind "$1" "$keep" && mount -t tmpfs -o mode=755 tmpfs "$2" &&
mkdir -p "$1" && mount --bind "$keep" "$1" && umount "$keep" && rmdir "$keep" && shift 2 && exec "$@"
"""
"""Mounts only Python below a folder that other users cannot enter."""


def as_nobody() -> list[str]:
    """Return the start of a command that drops all rights; skip the test if that is not possible."""
    if os.getuid() != 0:
        pytest.skip("only root may become another user")
    if shutil.which("setpriv") is None or shutil.which("unshare") is None:
        pytest.skip("no setpriv or no unshare on this system")
    drop = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    python = Path(sys.base_prefix)
    hidden = [folder for folder in reversed(python.parents) if not folder.stat().st_mode & 0o001]
    show = (
        ["unshare", "--mount", "sh", "-c", SHOW_PYTHON, "sh", str(python), str(hidden[0])] if hidden else []
    )
    command = [*show, *drop]
    trial = subprocess.run(
        [*command, sys.executable, "-c", "import dagster, torch"],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    if trial.returncode != 0:
        pytest.skip(f"another user cannot run this Python: {trial.stderr[-300:]}")
    return command


@pytest.fixture
def workspace(tiny_sd: Path) -> Generator[Workspace]:
    """A workspace with an empty cache in a folder of the user nobody."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    workspace = Workspace(folder / "Bilder für Lora", folder / "Modell é")
    workspace.root.mkdir()
    shutil.copytree(tiny_sd, workspace.model)
    write_photographs(workspace.data)
    (workspace.data / "photo1.png").rename(workspace.data / "Blüte 1.png")
    (workspace.data / "photo1.txt").rename(workspace.data / "Blüte 1.txt")
    workspace.recipe()
    make_home(workspace.root / "dagster home")  # without telemetry, which would write to $HOME
    for path in folder.rglob("*"):
        os.chown(path, NOBODY, NOBODY)
    yield workspace
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_job_works_for_another_user_in_another_folder(workspace: Workspace) -> None:
    nobody = as_nobody()
    writable = (
        subprocess.run([*nobody, "test", "-w", str(ROOT / "assets")], cwd="/", check=False).returncode == 0
    )
    assert not writable, "the source code must be read-only for this user"
    job = workspace.command("job", "execute", "-m", "assets.definitions", "-j", "small_train")
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "LC_ALL": "C",
        "HOME": "/nonexistent",
        "LATENTLINE_CONFIGS": str(workspace.file.parent),
        "DAGSTER_HOME": str(workspace.root / "dagster home"),
        "DO_NOT_TRACK": "1",
    }
    process = subprocess.run(
        [*nobody, *job],
        env=environment,
        cwd=workspace.root,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert f"  LoRA      {workspace.out / 'lora'}" in process.stdout.splitlines()
    assert (workspace.out / "lora" / "pytorch_lora_weights.safetensors").stat().st_uid == NOBODY
