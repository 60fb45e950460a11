"""The documentation is up to date: generated pages, commands and quoted messages."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from pipeline.cli.main import COMMANDS, latentline
from pipeline.recipe.deployment import (
    Deployment,
    DeploymentFile,
    KubernetesSettings,
    RaySettings,
    SlurmSettings,
    deployment_values,
)
from pipeline.recipe.keys import all_keys_of, keys_of
from pipeline.recipe.schema import all_keys
from tools.docs import checks_page, quick_starts_page, recipes_page
from tools.docs import coming_from_page as coming_from

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
LINE = re.compile(
    r"^(?: {4})?(?:[A-Z_]+=\S* )?((?:\.venv/bin/)?(?:latentline|dagster|make|python) .*)$", re.MULTILINE
)


@pytest.mark.parametrize(
    "page",
    [recipes_page, checks_page, coming_from, quick_starts_page],
    ids=["recipes", "checks", "coming_from", "quick_starts"],
)
def test_a_generated_page_is_up_to_date(page) -> None:
    text = page.page_path().read_text(encoding="utf-8")
    assert text == page.page_text(), f"write it again: python -m {page.__name__}"


def test_the_cards_in_the_readme_are_those_of_the_forecast() -> None:
    readme, hardware = ((ROOT / name).read_text("utf-8") for name in ("README.md", "docs/hardware.md"))
    table = readme.partition("| base model, 1024 px, rank 16 |")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) == 5
    for model, *cells in rows:
        assert f"| {model} | 1024 | {' | '.join(cells)} |" in hardware.replace(" * |", " |")


def test_every_key_of_a_recipe_is_on_its_page() -> None:
    text = recipes_page.page_text()
    for key in all_keys():
        section, _, name = key.rpartition(".")
        title = f"## `{section}`" if section else "## The recipe"
        body = text.split(title + "\n", 1)[1].split("\n## ", 1)[0]
        assert f"| `{name}` |" in body, key
    assert "| anything |" not in text, "the type of a key is missing"


def test_every_key_of_a_deployment_is_on_its_page_with_its_default() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (\S.*?) \|", page, re.MULTILINE))
    assert set(rows) == set(all_keys_of(DeploymentFile))
    defaults = deployment_values(Deployment())
    assert rows["pools"] == f"`{defaults['pools']}`"
    assert rows["executor"] == f"`{defaults['executor']}`"
    for model in (SlurmSettings, KubernetesSettings, RaySettings):
        for key, info in keys_of(model).items():
            default = info.get_default(call_default_factory=True)
            text = json.dumps(list(default) if isinstance(default, tuple) else default, default=str)
            shown = "required" if info.is_required() else f"`{text.strip(chr(34))}`"
            # A row may have two defaults: "`1`; Kubernetes: `0`".
            assert shown in re.split(r"; \w+: ", rows[f"launcher.{key}"]), key


def commands() -> list[tuple[str, str]]:
    found_commands = {
        (page.name, line.split("#")[0].strip())
        for page in PAGES
        for line in LINE.findall(page.read_text("utf-8"))
    }
    return sorted(found_commands)


@pytest.mark.parametrize(("page", "line"), commands(), ids=str)
def test_a_command_on_a_page_exists(page: str, line: str) -> None:
    program, *arguments = shlex.split(line)
    if program.endswith("latentline"):
        name, *rest = arguments
        assert name in COMMANDS
        command = latentline.get_command(None, name)  # type: ignore[arg-type]
        if isinstance(command, click.Group):
            command = command.commands[rest[0]]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {part for part in rest if part.startswith("--")} <= options
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert arguments[0] in targets
    elif program.endswith("dagster"):
        assert " ".join(arguments[:2]) in {
            "job execute",
            "asset materialize",
            "definitions validate",
            "asset list",
        }
        assert arguments[arguments.index("-m") + 1] == "assets.definitions"
    else:
        assert "-m" in arguments
        assert (ROOT / (arguments[arguments.index("-m") + 1].replace(".", "/") + ".py")).is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_each_latentline_command_starts(name: str) -> None:
    code = "from pipeline.cli.main import main; main()"
    subprocess.run([sys.executable, "-c", code, name, "--help"], cwd=ROOT, check=True, capture_output=True)


def test_every_message_on_the_troubleshooting_page_is_in_the_source() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    quoted = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) >= 15
    files = [
        path
        for layer in ("latentline", "pipeline", "resources", "launchers", "assets")
        for path in (ROOT / layer).rglob("*.py")
    ]
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text("utf-8") for path in files))
    missing = [text for text in quoted if text not in code]
    assert missing == []


def test_every_failure_on_the_failures_page_has_a_test_that_names_its_id() -> None:
    page = (ROOT / "docs/failures.md").read_text("utf-8")
    ids = re.findall(r"^\| ([A-Z]\d\d) \|", page, flags=re.MULTILINE)
    assert len(ids) > 100
    sources = (file.read_text("utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    names = " ".join(name for source in sources for name in re.findall(r"def (test_\w+)", source))
    assert [each for each in ids if f"_{each}_" not in names] == []
