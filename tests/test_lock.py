"""requirements.lock has the hashes of the versions in constraints.txt; `make lock` writes it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from tools.unneeded_packages import find_unneeded

ROOT = Path(__file__).resolve().parents[1]


def pinned(file: str) -> dict[str, str]:
    """Return version by package of all lines such as `six==1.17.0`."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return {
        re.sub("[._]", "-", name.lower()): version
        for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.M)
    }


def test_every_constraint_but_torch_is_locked() -> None:
    constraints = pinned("constraints.txt")
    assert constraints.pop("torch")
    assert pinned("requirements.lock") == constraints


def test_the_packages_that_build_the_project_are_locked() -> None:
    system = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]
    assert {re.split("[><=]", each)[0] for each in system["requires"]} <= pinned("requirements.lock").keys()


def test_each_locked_package_has_hashes_and_the_lock_names_no_address() -> None:
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert "://" not in text
    assert "--index" not in text
    entries = re.split(r"\n(?! )", text.strip())
    assert len(entries) == len(pinned("requirements.lock"))
    for entry in entries:
        assert re.fullmatch(r"[\w.-]+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+", entry), entry[:100]


def test_users_get_all_extras_but_the_tools_of_developers() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (extras,) = re.findall(r"^USER_EXTRAS := (\S+)$", makefile, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras.split(",")) == project["optional-dependencies"].keys() - {"dev", "mutants"}
    unneeded = find_unneeded(ROOT / "pyproject.toml", extras.split(","))
    assert {"pytest", "ruff", "basedpyright", "hypothesis"} <= set(unneeded)
    assert not {"torch", "dagster", "ray", "s3fs", "packaging"} & set(unneeded)
