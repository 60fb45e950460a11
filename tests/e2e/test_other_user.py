"""The job as a user who may write own folders only: another directory, odd letters, no locale, no home."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.e2e.conftest import Workspace, write_photographs
from tests.e2e.daemon import make_home

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534

SHOW_PYTHON = """
keep=$(mktemp -d) && mount --bind "$1" "$keep" && mount -t tmpfs -o mode=755 tmpfs "$2" &&
mkdir -p "$1" && mount --bind "$keep" "$1" && umount "$keep" && rmdir "$keep" && shift 2 && exec "$@"
"""
"""Where Python lies below a folder that others may not enter, only Python is shown to them there."""


def as_nobody() -> list[str]:
    """A command's beginning that gives up all rights; skips the test where that can't be done."""
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
    tried = subprocess.run(
        [*command, sys.executable, "-c", "import dagster, torch"],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode != 0:
        pytest.skip(f"another user cannot run this Python: {tried.stderr[-300:]}")
    return command


@pytest.fixture
def theirs(tiny_sd: Path) -> Generator[Workspace]:
    """Nothing cached, below a folder that belongs to nobody."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    made = Workspace(folder / "Bilder für Lora", folder / "Modell é")
    made.root.mkdir()
    shutil.copytree(tiny_sd, made.model)
    write_photographs(made.data)
    (made.data / "photo1.png").rename(made.data / "Blüte 1.png")
    (made.data / "photo1.txt").rename(made.data / "Blüte 1.txt")
    made.recipe()
    make_home(made.root / "dagster home")  # which has no telemetry: Dagster's would want to write in $HOME
    for path in folder.rglob("*"):
        os.chown(path, NOBODY, NOBODY)
    yield made
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_job_works_for_another_user_anywhere(theirs: Workspace) -> None:
    nobody = as_nobody()
    writable = (
        subprocess.run([*nobody, "test", "-w", str(ROOT / "assets")], cwd="/", check=False).returncode == 0
    )
    assert not writable, "the sources are meant to be read-only here"
    job = theirs.command("job", "execute", "-m", "assets.definitions", "-j", "small_train")
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "LC_ALL": "C",
        "HOME": "/nonexistent",
        "LATENTLINE_CONFIGS": str(theirs.file.parent),
        "DAGSTER_HOME": str(theirs.root / "dagster home"),
        "DO_NOT_TRACK": "1",
    }
    done = subprocess.run(
        [*nobody, *job], env=environment, cwd=theirs.root, capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == f"  LoRA      {theirs.out / 'lora'}"
    assert (theirs.out / "lora" / "pytorch_lora_weights.safetensors").stat().st_uid == NOBODY
