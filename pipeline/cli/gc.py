"""`latentline gc`: what a cache holds, and what nobody needs any more."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.cache.users import unregister_user
from pipeline.cli.sizes import bytes_text
from pipeline.errors import StoreError, counted
from pipeline.maintenance.gc import GRACE_S, Survey, delete, survey
from pipeline.recipe import load_recipes
from pipeline.storage.addresses import Address, absolute

MAX_SHOWN = 10


@click.command
@click.option("--delete", "really", is_flag=True, help="Delete the orphans; without it nothing is deleted.")
@click.option(
    "--grace-hours",
    type=click.FloatRange(0),
    default=GRACE_S / 3600,
    show_default=True,
    help="Younger entries are kept, whoever made them.",
)
@click.option(
    "--cache-dir",
    "cache_dirs",
    multiple=True,
    help="Of which caches, a folder or an address as in a recipe; if not said, of all recipes'.",
)
@click.option(
    "--forget",
    "forgotten",
    multiple=True,
    type=click.Path(path_type=Path),
    help="An output folder that is gone for good, so that what only it needed is an orphan.",
)
def command(
    really: bool, grace_hours: float, cache_dirs: tuple[str, ...], forgotten: tuple[Path, ...]
) -> None:
    """Show what each cache holds and which entries no recipe needs; with --delete, delete those.

    An entry is needed by every output folder, of any project, whose last jobs asked for it, whose tables name
    it, or which has an unfinished run that trains on it.
    """
    named = [absolute(text, Path()) for text in cache_dirs]
    folders = named or sorted({recipe.cache_dir for recipe in load_recipes()}, key=str)
    if not folders:
        click.echo("there is no recipe, and so no cache; name one with --cache-dir")
    for folder in folders:
        for output_dir in forgotten:
            _require_gone(output_dir)
            known = unregister_user(folder, output_dir.expanduser().absolute())
            click.echo(f"{output_dir}: {'forgotten' if known else 'was not registered in'} {folder}")
        found = survey(folder, grace_s=grace_hours * 3600)
        if named:
            _require_cache(folder, found)
        _show(folder, found, grace_hours)
        waste = len(found.orphans) + len(found.leftovers)
        if waste and really:
            files, num_bytes = delete(folder, found)
            click.echo(f"  deleted {counted(files, 'file')}, {bytes_text(num_bytes)}")
        elif waste:
            click.echo("  nothing was deleted; latentline gc --delete does it")


def _require_cache(folder: Address, found: Survey) -> None:
    """Nobody mistakes a folder of something else for a cache.

    Raises:
        StoreError: It holds files, and neither an entry nor a registration.
    """
    if found.foreign and not found.users and not found.entries:
        raise StoreError(
            f"this is no cache: it holds {counted(len(found.foreign), 'file')} of something else",
            where=str(folder),
            fix="name a recipe's cache_dir, or leave --cache-dir out to see those of all recipes",
        )


def _require_gone(output_dir: Path) -> None:
    if output_dir.is_dir():
        raise StoreError(
            "an output folder that is still there cannot be forgotten: its tables name entries",
            where=str(output_dir),
            fix="delete the folder first if it is not needed any more",
        )


def _show(folder: Address, found: Survey, grace_hours: float) -> None:
    click.echo(f"{folder}: {counted(found.entries, 'entry', 'entries')}, {bytes_text(found.entry_bytes)}")
    for user in found.users:
        gone = "" if user.output_dir.is_dir() else "   not there now: kept, see --forget"
        click.echo(f"  {len(user.keys):>9,} needed by {user.recipe}: {user.output_dir}{gone}")
    orphans, leftovers = sum(found.orphans.values()), sum(found.leftovers.values())
    click.echo(f"  {len(found.orphans):>9,} needed by nobody, {bytes_text(orphans)}")
    if found.young:
        click.echo(f"  {found.young:>9,} needed by nobody and younger than {grace_hours:g} h: kept")
    if found.leftovers:
        click.echo(f"  {len(found.leftovers):>9,} left over by interrupted writers, {bytes_text(leftovers)}")
    if found.foreign:
        shown = ", ".join(found.foreign[:MAX_SHOWN])
        click.echo(f"  {len(found.foreign):>9,} not Latentline's, left alone: {shown}")
