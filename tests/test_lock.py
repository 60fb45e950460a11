"""requirements.lock has the hashes of the versions in constraints.txt; `make lock` writes it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def pinned(file: str) -> dict[str, str]:
    """Return version by package of all lines such as `six==1.17.0`."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return {
        re.sub("[._]", "-", name.lower()): version
        for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.M)
    }


def test_every_constraint_is_locked_except_torch_and_the_packages_for_gpus() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for_gpus = {re.split("[><=]", each)[0] for each in project["optional-dependencies"]["gpu"]}
    constraints = pinned("constraints.txt")
    assert {"torch", *for_gpus} <= constraints.keys()
    locked = {name: version for name, version in constraints.items() if name not in {"torch", *for_gpus}}
    assert pinned("requirements.lock") == locked


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
