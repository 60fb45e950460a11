"""`latentline verify`: read every cache entry of a recipe and report the bad ones."""

from __future__ import annotations

import sys
from typing import Any

import click

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cli.conventions import RECIPE_WITH_OUTPUTS, echo, log_to_stderr
from pipeline.cli.json_output import give
from pipeline.errors import counted
from pipeline.maintenance.verify import BadEntry, needed_entries, repair, verify
from pipeline.recipe import Recipe
from pipeline.recipe.isolation import require_isolation
from pipeline.storage.tables import Tables

MAX_SHOWN = 50
"""Maximum number of bad entries shown."""


@click.command(short_help="Read all cache entries and find damaged ones.")
@click.argument("recipe", type=RECIPE_WITH_OUTPUTS)
@click.option("--repair", "do_repair", is_flag=True, help="Encode missing and damaged entries again.")
def command(recipe: Recipe, do_repair: bool) -> None:
    """Read every cache entry that RECIPE needs, and check its size, header, checksum and values.

    Jobs verify an entry once, and again if the size, times or inode of its file change. So they do not notice
    data that a faulty disk has altered. This command does, because it reads every file.

    The exit status is 1 if an entry is missing or damaged and was not repaired.
    """
    require_isolation(recipe)
    tables = Tables(recipe.output_dir, log=log_to_stderr)
    needed = needed_entries(recipe, tables, log=log_to_stderr)
    bad = verify(recipe, needed, log=log_to_stderr)

    num_bytes = sum(each.spec.file_bytes for each in needed)
    size = f"{counted(len(needed), 'entry', 'entries')}, {counted(num_bytes, 'byte')}"
    echo(f"{recipe.name}: {size}, {len(bad):,} missing or damaged")
    _show(bad)
    damaged_packs = RecipeEntries(recipe).store.damaged_packs()
    for where, problem in damaged_packs.items():
        echo(f"warning: the entries of a damaged pack count as missing: {where}: {problem}", err=True)
    result: dict[str, Any] = {
        "recipe": recipe.name,
        "entries": len(needed),
        "bytes": num_bytes,
        "bad": _values(bad),
        "damaged_packs": damaged_packs,
    }
    if not bad:
        give(result)
        return
    if not do_repair:
        echo(f"fix: run latentline verify {recipe.name} --repair to encode them again", err=True)
        give(result)
        sys.exit(1)

    repair(recipe, tables, bad, log=echo)
    still_bad = verify(recipe, needed, log=log_to_stderr)
    echo(f"repaired {len(bad) - len(still_bad):,} of {counted(len(bad), 'entry', 'entries')}")
    _show(still_bad)
    give({**result, "still_bad": _values(still_bad)})
    sys.exit(1 if still_bad else 0)


def _values(bad: list[BadEntry]) -> list[dict[str, str]]:
    return [{"sample_id": each.needed.name, "path": each.path, "problem": each.problem} for each in bad]


def _show(bad: list[BadEntry]) -> None:
    for each in bad[:MAX_SHOWN]:
        echo(f"  {each.needed.name}: {each.problem}\n    {each.path}")
    if len(bad) > MAX_SHOWN:
        echo(f"  and {len(bad) - MAX_SHOWN:,} more")
