"""`latentline verify`: is every entry of a recipe's cache what it was when it was made?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import click

from pipeline.cache.store import EntryState
from pipeline.cli.arguments import RECIPE
from pipeline.errors import counted
from pipeline.maintenance.verify import Bad, needed_entries, repair, verify
from pipeline.recipe import Recipe
from pipeline.recipe.isolation import require_isolation
from pipeline.storage.tables import Tables

MAX_SHOWN = 50


@click.command
@click.argument("recipe", type=RECIPE)
@click.option("--repair", "mend", is_flag=True, help="Make what is missing or damaged again, right away.")
def command(recipe: Recipe, mend: bool) -> None:
    """Read every cache entry of RECIPE whole: size, header, checksum, finite values.

    A job trusts an entry whose file is as it was when last verified; a disk that lies is found here. Exit
    status 1 where an entry is missing or damaged and was not repaired.
    """
    require_isolation(recipe)
    tables = Tables(recipe.output_dir)
    needed = needed_entries(recipe, tables)
    bad = verify(recipe, needed, _with_bar(len(needed)))
    num_bytes = sum(each.spec.file_bytes for each in needed)
    size = f"{counted(len(needed), 'entry', 'entries')}, {counted(num_bytes, 'byte')}"
    click.echo(f"{recipe.name}: {size}, {len(bad):,} of them bad")
    _show(bad)
    if not bad:
        return
    if not mend:
        fix = f"latentline verify {recipe.name} --repair, which makes them again"
        click.echo(f"fix: {fix}", err=True)
        sys.exit(1)
    repair(recipe, tables, bad, log=click.echo)
    left = verify(recipe, needed, _with_bar(len(needed)))
    click.echo(f"repaired {len(bad) - len(left):,} of {counted(len(bad), 'entry', 'entries')}")
    _show(left)
    sys.exit(1 if left else 0)


def _show(bad: list[Bad]) -> None:
    for each in bad[:MAX_SHOWN]:
        click.echo(f"  {each.needed.name}: {each.problem}\n    {each.path}")
    if len(bad) > MAX_SHOWN:
        click.echo(f"  and {len(bad) - MAX_SHOWN:,} more")


def _with_bar(length: int) -> Callable[[Iterator[EntryState]], Iterator[EntryState]]:
    """Passes states on and shows how far they are; silent where nobody looks at a terminal."""

    def shown(states: Iterator[EntryState]) -> Iterator[EntryState]:
        quiet = not sys.stderr.isatty()
        with click.progressbar(states, length=length, label="verified", file=sys.stderr, hidden=quiet) as bar:
            yield from bar

    return shown
