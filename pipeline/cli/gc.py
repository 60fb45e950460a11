"""`latentline gc`: list the contents of a cache, and delete entries that no recipe needs."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.cache.users import unregister_user
from pipeline.cli.conventions import bytes_text, usable_recipes
from pipeline.errors import StoreError, counted
from pipeline.maintenance.gc import GRACE_S, Survey, delete, survey
from pipeline.storage.addresses import Address, absolute

MAX_SHOWN = 10
"""Maximum number of foreign files shown."""


@click.command
@click.option(
    "--delete", "do_delete", is_flag=True, help="Delete the orphans. By default nothing is deleted."
)
@click.option(
    "--grace-hours",
    type=click.FloatRange(0),
    default=GRACE_S / 3600,
    show_default=True,
    help="Keep all entries younger than this.",
)
@click.option(
    "--cache-dir",
    "cache_dirs",
    multiple=True,
    help="Cache to examine, a folder or an address as in a recipe. By default the caches of all recipes.",
)
@click.option(
    "--forget",
    "forgotten",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Output folder that was deleted for good. Entries that only it needed become orphans.",
)
def command(
    do_delete: bool, grace_hours: float, cache_dirs: tuple[str, ...], forgotten: tuple[Path, ...]
) -> None:
    """Show what each cache holds and which entries no recipe needs. With --delete, delete those.

    An output folder of any project needs an entry if its last jobs requested the entry, if one of its tables
    names it, or if one of its unfinished runs trains on it.
    """
    given = [absolute(text, Path()) for text in cache_dirs]
    caches = given or sorted({recipe.cache_dir for recipe in usable_recipes()}, key=str)
    if not caches:
        click.echo("no recipes were found, so no cache is known; pass one with --cache-dir")
    for cache_dir in caches:
        for output_dir in forgotten:
            _require_deleted(output_dir)
            was_registered = unregister_user(cache_dir, output_dir.expanduser().absolute())
            state = "forgotten by" if was_registered else "was not registered in"
            click.echo(f"{output_dir}: {state} {cache_dir}")

        surveyed = survey(cache_dir, grace_s=grace_hours * 3600)
        if given:
            _require_cache(cache_dir, surveyed)
        _show(cache_dir, surveyed, grace_hours)
        has_garbage = bool(surveyed.orphans or surveyed.leftovers)
        if has_garbage and do_delete:
            num_files, num_bytes = delete(cache_dir, surveyed)
            click.echo(f"  deleted {counted(num_files, 'file')}, {bytes_text(num_bytes)}")
        elif has_garbage:
            click.echo("  nothing was deleted; run latentline gc --delete to delete the unneeded files")


def _require_cache(cache_dir: Address, surveyed: Survey) -> None:
    """Raise StoreError if the folder holds only foreign files, and so cannot be a cache."""
    if surveyed.foreign and not surveyed.users and not surveyed.entries:
        raise StoreError(
            f"not a cache: the folder holds only {counted(len(surveyed.foreign), 'file')} of other programs",
            where=str(cache_dir),
            fix="pass the cache_dir of a recipe, or omit --cache-dir to examine the caches of all recipes",
        )


def _require_deleted(output_dir: Path) -> None:
    """Raise StoreError if the output folder still exists."""
    if output_dir.is_dir():
        raise StoreError(
            "the output folder still exists and its tables name entries, so it cannot be forgotten",
            where=str(output_dir),
            fix="delete the folder first if you no longer need it",
        )


def _show(cache_dir: Address, surveyed: Survey, grace_hours: float) -> None:
    entries = counted(surveyed.entries, "entry", "entries")
    click.echo(f"{cache_dir}: {entries}, {bytes_text(surveyed.entry_bytes)}")
    for user in surveyed.users:
        note = "" if user.output_dir.is_dir() else "   folder is missing: entries kept, see --forget"
        click.echo(f"  {len(user.keys):>9,} needed by {user.recipe}: {user.output_dir}{note}")

    orphan_bytes = bytes_text(sum(surveyed.orphans.values()))
    click.echo(f"  {len(surveyed.orphans):>9,} not needed, {orphan_bytes}")
    if surveyed.young:
        click.echo(f"  {surveyed.young:>9,} not needed but younger than {grace_hours:g} h: kept")
    if surveyed.leftovers:
        leftover_bytes = bytes_text(sum(surveyed.leftovers.values()))
        click.echo(f"  {len(surveyed.leftovers):>9,} left over from interrupted writes, {leftover_bytes}")
    if surveyed.foreign:
        names = ", ".join(surveyed.foreign[:MAX_SHOWN])
        names += ", ..." if len(surveyed.foreign) > MAX_SHOWN else ""
        click.echo(f"  {len(surveyed.foreign):>9,} from other programs, never touched: {names}")
