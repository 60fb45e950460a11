"""The image of deploy/Dockerfile: its packages, its build context, and that nothing in it is secret."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")


def test_packages_are_installed_with_the_options_of_make_install() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for options in (
        "--no-deps --only-binary :all: --require-hashes -r requirements.lock",
        "grep '^torch==' constraints.txt",
    ):
        assert options in makefile
        assert options in DOCKERFILE


def test_the_image_names_no_index_and_no_secret_and_its_user_is_not_root() -> None:
    assert not re.search(r"https?://|index-url|trusted-host|--cert\b", DOCKERFILE)
    assert not re.search(r"^(ARG|ENV)\b.*(PASSWORD|TOKEN|SECRET|_KEY)", DOCKERFILE, re.MULTILINE)
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE) == ["${UID}:${UID}"]


def test_the_build_context_has_only_what_the_image_needs() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    assert patterns[0] == "*", "everything that is not named stays out"
    included = {line[1:].rstrip("/") for line in patterns if line.startswith("!")}
    assert {name for name in included if not (ROOT / name).exists()} == set()
    assert {"assets", "configs", "demo", "latentline", "pipeline", "resources"} <= included
    copied = re.findall(r"^COPY (?!--from|\. )(.*) \S+$", DOCKERFILE, re.MULTILINE)
    assert {name for line in copied for name in line.split()} <= included


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_image_is_built_and_the_demo_runs_in_it(tmp_path: Path) -> None:
    for program in ("buildah", "debootstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"needs Debian's package {program}")
    if os.geteuid() != 0:
        pytest.skip("debootstrap needs root")
    if "LATENTLINE_IMAGE_CHECK" not in os.environ:
        pytest.skip("takes 12 GB of disk and 20 minutes; LATENTLINE_IMAGE_CHECK=1 runs it")
    subprocess.run([ROOT / "tools" / "image_check.sh", tmp_path / "image"], check=True)
