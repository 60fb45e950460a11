"""Generated recipes of strangers read and write nothing outside of their project, and run no code.

`make test` runs some hundred recipes; `python -m pytest -m slow tests/fuzz/test_untrusted.py` runs 5,000.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pipeline.recipe import project_root
from tests.pipeline.dataset_folder import picture

RECIPE = {
    "datasets": [{"name": "photos", "path": "data/list.csv", "captions": {"from": "column"}}],
    "output_dir": "outputs/small",
    "model": {"base": "owner/name"},
}


CODE = "import sitecustomize; sitecustomize.main()"


def write(file: Path, content: str | bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)


def make_project(folder: Path) -> Path:
    """Fill a project with code, data and links, and its outside with files that no recipe may read."""
    root, project, outside = project_root(), folder / "project", folder / "outside"
    shutil.copytree(root / "pipeline", project / "pipeline", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "tests/fuzz/untrusted.py", project / "sitecustomize.py")
    write(project / "pyproject.toml", b"")  # as in a checkout, which is a project
    write(project / "configs/recipe.schema.json", (root / "configs/recipe.schema.json").read_bytes())
    write(project / "configs/base.json", json.dumps(RECIPE))

    for place in (project / "data", outside, folder / "home"):
        for number in range(2):
            write(place / f"photos/{number}.png", picture(number))
            write(place / f"photos/{number}.txt", f"s3cr3t of {place.name}" if place == outside else "a rose")
        write(place / "list.csv", "path,caption,score\nphotos/0.png,a rose,1\nphotos/1.png,a tulip,2\n")
    write(project / "list.csv", "path,caption\ndata/photos/0.png,a rose\n")
    rows = [f"{outside}/photos/0.png", "../../outside/photos/1.png", f"file://{outside}/photos/0.png"]
    write(project / "data/rows_outside.csv", "\n".join(["path,caption", *(f"{row},a rose" for row in rows)]))
    write(outside / "refs.json", json.dumps({"version": 1, "refs": {"a.png": [f"{outside}/photos/0.png"]}}))
    write(outside / "model/model_index.json", json.dumps({"_class_name": "StableDiffusionPipeline"}))
    write(project / "models/tiny/model_index.json", json.dumps({"_class_name": "StableDiffusionPipeline"}))
    write(outside / "lora.safetensors", b"\2\0\0\0\0\0\0\0{}")
    with zipfile.ZipFile(outside / "a.zip", "w") as archive:
        archive.writestr("x/0.png", picture(0))
    for name in (
        ".git/hooks/pre-commit",
        ".github/workflows/ci.yml",
        ".venv/lib/a.py",
        ".dagster/dagster.yaml",
    ):
        write(project / name, "code")

    for link in (
        "linked/link",
        "linked/deep/photos",
        "outputs/linked",
        ".cache/linked",
        "models/linked/unet",
    ):
        (project / link).parent.mkdir(parents=True, exist_ok=True)
        (project / link).symlink_to(outside / "photos", target_is_directory=True)
    (folder / "temp").mkdir()
    return project


def contents(folder: Path) -> dict[str, str]:
    """Return the hash of each file, except for those that a stranger's recipe may write."""
    ignored = {"outputs", ".cache", "__pycache__"}
    return {
        str(file): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not file.is_symlink() and not ignored.intersection(file.parts)
    }


def run(folder: Path, first: int, count: int) -> dict[str, int]:
    """Run recipes in a network namespace without routes, and return the counts of outcomes."""
    project = folder / "project"
    variables = {
        "LATENTLINE_UNTRUSTED": "1",
        "LATENTLINE_FUZZ_FOLDER": str(folder),
        "PYTHONPATH": str(project),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "temp"),
        # Base models from the Hub are allowed: its client may look up its token, but there is no route to it.
        "HF_HOME": str(folder / "temp/hub"),
        "HF_HUB_OFFLINE": "1",
        "PATH": os.environ["PATH"],
    }
    isolated = ["unshare", "--user", "--map-root-user", "--net"]
    probe = (
        subprocess.run([*isolated, "true"], capture_output=True, check=False)
        if shutil.which("unshare")
        else None
    )
    prefix = isolated if probe is not None and probe.returncode == 0 else []
    process = subprocess.run(
        [*prefix, sys.executable, "-P", "-c", CODE, str(first), str(count)],
        cwd=project,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout.splitlines()[-1])


def assert_nothing_leaves_the_project(folder: Path, first: int, count: int, batch: int) -> None:
    project = make_project(folder)
    before = contents(project), contents(folder / "outside"), contents(folder / "home")
    totals = {"refused": 0, "scanned": 0, "validated": 0}
    for number in range(first, first + count, batch):
        counts = run(folder, number, batch)
        totals = {name: total + counts[name] for name, total in totals.items()}
    assert (contents(project), contents(folder / "outside"), contents(folder / "home")) == before
    assert not (folder / "violations.txt").exists()

    # Otherwise the test would only show that recipes are refused.
    assert totals["scanned"] > count / 20
    assert totals["refused"] > count / 5
    assert totals["validated"] > 0


def test_some_hundred_recipes(tmp_path: Path) -> None:
    assert_nothing_leaves_the_project(tmp_path, 0, 200, batch=200)


@pytest.mark.slow
@pytest.mark.timeout(3_600)
def test_5000_recipes(tmp_path: Path) -> None:
    assert_nothing_leaves_the_project(tmp_path, 1_000, 5_000, batch=1_000)


def test_the_watch_finds_what_a_recipe_would_do(tmp_path: Path) -> None:
    make_project(tmp_path)
    attacks = {
        f"open('{tmp_path}/outside/list.csv').read()": "open",
        f"open('{tmp_path}/project/pipeline/new.py', 'w')": "written",
        f"import os; os.listdir('{tmp_path}/home')": "os.listdir",
        "import socket; socket.socket().connect_ex(('127.0.0.1', 9))": "socket.connect",
        "import subprocess; subprocess.run(['true'])": "subprocess.Popen",
        f"import os; os.mkdir('{tmp_path}/project/.git/x')": "os.mkdir",
    }
    for code, event in attacks.items():
        (tmp_path / "violations.txt").unlink(missing_ok=True)
        variables = {
            **os.environ,
            "LATENTLINE_FUZZ_FOLDER": str(tmp_path),
            "PYTHONPATH": str(tmp_path / "project"),
        }
        subprocess.run([sys.executable, "-P", "-c", code], env=variables, check=True)
        assert event in (tmp_path / "violations.txt").read_text()
