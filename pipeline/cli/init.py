"""`latentline init`: write a project folder for an installation without a checkout."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from pipeline.cli.conventions import echo
from pipeline.cli.json_output import give
from pipeline.errors import FileAccessError
from pipeline.recipe.project import MARKER

# In a checkout, some of these files are links to the checkout's own ones. A wheel contains their text.
_TEMPLATE = Path(__file__).parent / "project_template"

# The names in the template have no dots in front, because setuptools' patterns do not match hidden files.
FILES = {
    ".dagster/dagster.yaml": "dagster.yaml",
    ".gitignore": "gitignore",
    "workspace.yaml": "workspace.yaml",
    "configs/recipe.schema.json": "recipe.schema.json",
    MARKER: "latentline-project",
}
"""Path in the project to path in the template, in the order of writing; recipes are copied before."""


@click.command(short_help="Write a project folder with example recipes.")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=".")
def command(folder: Path) -> None:
    """Write a project folder to FOLDER, by default the working directory.

    It gets configs/ with example recipes, .dagster/ for Dagster's history, workspace.yaml and .gitignore. All
    commands work in it as in a checkout. Existing files are never overwritten.
    """
    files = {f"configs/examples/{each.name}": each for each in (_TEMPLATE / "examples").glob("*.yaml")}
    files |= {path: _TEMPLATE / name for path, name in FILES.items()}
    if existing := [path for path in files if (folder / path).exists() or (folder / path).is_symlink()]:
        raise FileAccessError(
            f"{existing[0]} already exists and is never overwritten",
            where=str(folder.absolute()),
            fix="choose another folder, or move that file",
        )
    for path, source in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        # Another command may have written the file since the check.
        with (folder / path).open("xb") as opened:
            opened.write(source.read_bytes())

    give({"folder": folder.absolute(), "files": [*files]})
    echo(f"wrote {folder.absolute()}: a project folder, with examples of recipes in configs/examples/")
    if folder.absolute() != Path.cwd():
        echo(f"next: cd {shlex.quote(str(folder))}")
    echo("then: latentline new flowers --images FOLDER     writes configs/flowers.yaml")
    echo("      latentline run flowers")
    echo('the UI: DAGSTER_HOME="$PWD/.dagster" dagster dev')
