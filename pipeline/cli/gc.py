"""`latentline gc`: list caches or training runs, and delete entries or old runs that no recipe needs."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import click
from click.core import ParameterSource

from pipeline.cache.backends import cache_folder
from pipeline.cache.users import access_fix, unregister_user
from pipeline.cli.conventions import RECIPE, bytes_text, echo, log_to_stderr, reported_recipes
from pipeline.errors import RecipeError, StoreError, counted
from pipeline.maintenance.gc import GRACE_S, Survey, delete, survey
from pipeline.maintenance.gc_packs import Pack, Packs
from pipeline.maintenance.needed_keys import StaleRun
from pipeline.maintenance.old_runs import RunSurvey, delete_leftover, delete_run, survey_runs
from pipeline.maintenance.remote_runs import RemoteRuns
from pipeline.outputs.folder import OutputFolder, outputs_of
from pipeline.recipe import Recipe
from pipeline.storage.addresses import Address, Url, absolute

MAX_SHOWN = 10
"""Maximum number of foreign files shown."""


@click.command(short_help="List and delete unneeded cache entries or old runs.")
@click.argument("recipes", metavar="[RECIPE]...", nargs=-1, type=RECIPE)
@click.option(
    "--delete", "do_delete", is_flag=True, help="Delete what is not needed. By default it is only listed."
)
@click.option(
    "--keep-runs",
    "num_kept_runs",
    type=click.IntRange(0),
    metavar="N",
    help="List training runs instead of cache entries, and keep the newest N of each output folder.",
)
@click.option(
    "--grace-hours",
    type=click.FloatRange(0),
    default=GRACE_S / 3600,
    show_default=True,
    help="Keep cache entries younger than this. A running job may still be about to use them.",
)
@click.option(
    "--cache-dir",
    "cache_dirs",
    multiple=True,
    help="Cache to examine, a folder or an address as in a recipe. Repeat it for several. By default the "
    "caches of the given recipes, or of all.",
)
@click.option(
    "--forget",
    "forgotten",
    multiple=True,
    help="Output folder or address that you have deleted for good. The cache then no longer keeps the "
    "entries that only it needed. Repeat it for several.",
)
def command(
    recipes: tuple[Recipe, ...],
    *,
    do_delete: bool,
    num_kept_runs: int | None,
    grace_hours: float,
    cache_dirs: tuple[str, ...],
    forgotten: tuple[str, ...],
) -> None:
    """List cache entries that nothing needs, or old training runs, and delete them with --delete.

    By default, the command examines the caches of the given recipes, or of all. A cache may be shared, so
    each output folder that uses it is registered in it, also those of other projects. An entry is needed if
    the last jobs of a registered folder requested it, if a table in the folder names it, or if an unfinished
    run in the folder trains on it. A training registers its entries too, so other machines keep them. If you
    may not read a folder, what it has registered is kept.

    The files of entries that are also in packs are not needed (see latentline pack). Before one is deleted,
    its copy in the pack is read and verified. A pack is deleted if nothing needs any of its entries.

    With --keep-runs N, the command examines the training runs of these recipes instead. A run is kept if it
    is one of the newest N, if its LoRA is in lora/, if start_from of a recipe or of a run in training names
    one of its files, or if it is being trained. All other runs are old; deleting one deletes its checkpoints
    and LoRA files too.
    """
    if num_kept_runs is not None:
        source = click.get_current_context().get_parameter_source("grace_hours")
        if cache_dirs or forgotten or source is ParameterSource.COMMANDLINE:
            raise click.UsageError(
                "--keep-runs excludes --grace-hours, --cache-dir and --forget, which are about caches."
            )
        _collect_runs(recipes, num_kept_runs, do_delete=do_delete)
        return
    if recipes and cache_dirs:
        raise click.UsageError("Pass recipes or --cache-dir, not both.")

    given = [absolute(text, Path()) for text in cache_dirs]
    caches = given or sorted({recipe.cache_dir for recipe in recipes or reported_recipes().recipes}, key=str)
    if not caches:
        echo("no recipes were found, so no cache is known; pass one with --cache-dir")
    for cache_dir in caches:
        _forget(cache_dir, [absolute(text, Path.cwd()) for text in forgotten])
        surveyed = survey(cache_dir, grace_s=grace_hours * 3600)
        if given:
            _require_cache(cache_dir, surveyed)
        _show(cache_dir, surveyed, grace_hours)
        packs = surveyed.packs
        has_garbage = bool(surveyed.orphans or surveyed.leftovers or surveyed.old_orders)
        has_garbage |= bool(packs.single or packs.old or surveyed.stale_runs)
        if has_garbage and do_delete:
            num_files, num_bytes = delete(cache_dir, surveyed, log=log_to_stderr)
            echo(f"  deleted {counted(num_files, 'file')}, {bytes_text(num_bytes)}")
        elif has_garbage:
            echo("  nothing was deleted; run latentline gc --delete to delete the unneeded files")


def _collect_runs(recipes: tuple[Recipe, ...], num_kept: int, *, do_delete: bool) -> None:
    """Show the runs of the given recipes, or of all, and delete the old ones if `do_delete`.

    Raises:
        RecipeError: A recipe of the folder cannot be read, so the runs that it starts from are unknown.
    """
    folder = reported_recipes()
    if folder.broken and do_delete:
        names = ", ".join(broken.name for broken in folder.broken)
        raise RecipeError(
            f"no run was deleted, because start_from of a recipe with mistakes may name one: {names}",
            where=str(folder.broken[0].file.parent),
            fix="correct the recipe, or move its file to another folder",
        )

    chosen = recipes or tuple(folder.recipes)
    if not chosen:
        echo("no recipes were found, so no run is known")
    for recipe in chosen:
        # A recipe given by its path may be outside the folder.
        all_recipes = [*folder.recipes, *recipes]
        if isinstance(recipe.output_address, Url):
            remote = RemoteRuns(outputs_of(recipe, echo))
            surveyed = remote.survey(num_newest=num_kept, recipes=all_recipes, will_delete=do_delete)
            delete_one, delete_rest = remote.delete, remote.delete
        else:
            surveyed = survey_runs(recipe.output_dir, num_newest=num_kept, recipes=all_recipes)
            delete_one, delete_rest = delete_run, delete_leftover

        _show_runs(surveyed)
        num_bytes = sum(run.num_bytes for run in surveyed.old) + sum(surveyed.leftovers.values())
        num_folders = len(surveyed.old) + len(surveyed.leftovers)
        if num_folders and do_delete:
            for run in surveyed.old:
                delete_one(run.folder, log=log_to_stderr)
            for leftover in surveyed.leftovers:
                delete_rest(leftover)
            echo(f"  deleted {counted(num_folders, 'folder')}, {bytes_text(num_bytes)}")
        elif num_folders:
            names = "".join(f" {each.name}" for each in recipes)
            again = f"latentline gc{names} --keep-runs {num_kept} --delete"
            echo(f"  nothing was deleted; {again} deletes {bytes_text(num_bytes)}")


def _show_runs(surveyed: RunSurvey) -> None:
    total = bytes_text(sum(run.num_bytes for run in surveyed.runs))
    echo(f"{surveyed.where}: {counted(len(surveyed.runs), 'run')}, {total}")
    for run in surveyed.runs:
        changed = datetime.fromtimestamp(run.changed_s, tz=UTC).astimezone()
        fate = f"kept: {run.kept}" if run.kept else "old"
        size = bytes_text(run.num_bytes)
        echo(f"  {run.folder.name}  {size:>9}  {changed:%Y-%m-%d %H:%M}  {run.state:<24}  {fate}")
    for run in surveyed.incomplete:
        echo(f"  {run.folder.name}  {bytes_text(run.num_bytes):>9}  {run.state}")
    if surveyed.leftovers:
        size = bytes_text(sum(surveyed.leftovers.values()))
        echo(f"  {counted(len(surveyed.leftovers), 'folder')} of interrupted deletions, {size}")


def _forget(cache_dir: Address, forgotten: Sequence[Address]) -> None:
    for output_dir in forgotten:
        _require_deleted(output_dir)
        was_registered = unregister_user(cache_dir, output_dir)
        state = "forgotten by" if was_registered else "was not registered on this machine in"
        echo(f"{output_dir}: {state} {cache_dir}")


def _require_cache(cache_dir: Address, surveyed: Survey) -> None:
    """Raise StoreError if the folder holds only foreign files, and so cannot be a cache."""
    if surveyed.foreign and not surveyed.users and not surveyed.entries and not surveyed.packs.all:
        raise StoreError(
            f"not a cache: the folder holds only {counted(len(surveyed.foreign), 'file')} of other programs",
            where=str(cache_dir),
            fix="pass the cache_dir of a recipe, or omit --cache-dir to examine the caches of all recipes",
        )


def _require_deleted(output_dir: Address) -> None:
    """Raise StoreError if the output folder still exists, or if this user may not see whether it does."""
    try:
        exists = _exists(output_dir)
    except PermissionError as err:
        raise StoreError(
            "the output folder may still exist, because this user may not read the folders above it, and "
            "--forget is only for deleted ones",
            where=str(output_dir),
            fix=access_fix(output_dir, err),
        ) from err
    if exists:
        raise StoreError(
            "the output folder still exists, and --forget is only for deleted ones",
            where=str(output_dir),
            fix="delete the folder first if you no longer need it",
        )


def _exists(output_dir: Address) -> bool:
    """Return whether an output folder exists; at an address, whether it holds a table or a run.

    Raises:
        PermissionError: This user may not read the folders above it.
    """
    if isinstance(output_dir, Url):
        return any(OutputFolder(output_dir, Path()).names(top) for top in ("tables", "runs"))
    try:
        return stat.S_ISDIR(output_dir.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _show(cache_dir: Address, surveyed: Survey, grace_hours: float) -> None:
    entries = counted(surveyed.entries, "entry", "entries")
    echo(f"{cache_dir}: {entries}, {bytes_text(surveyed.entry_bytes)}")
    for user in surveyed.users:
        note = ""
        if not user.is_here:
            note = f"   on {user.machine}: entries kept"
        elif user.id in surveyed.unreadable:
            note = "   cannot be read: registered entries kept"
        elif not _exists(user.output_dir):
            note = "   folder is missing: entries kept, see --forget"
        echo(f"  {len(user.keys):>9,} needed by {user.recipe}: {user.output_dir}{note}")
        for run, keys in user.run_keys.items():
            is_stale = StaleRun(user.output_dir, run) in surveyed.stale_runs
            state = "finished or deleted: registration not needed" if is_stale else "unfinished: entries kept"
            echo(f"  {len(keys):>9,} read by run {run} of {user.recipe}, {state}")

    orphan_bytes = bytes_text(sum(surveyed.orphans.values()))
    echo(f"  {len(surveyed.orphans):>9,} not needed, {orphan_bytes}")
    if surveyed.young:
        echo(f"  {surveyed.young:>9,} not needed but younger than {grace_hours:g} h: kept")
    _show_packs(cache_dir, surveyed.packs, grace_hours)
    if surveyed.leftovers:
        leftover_bytes = bytes_text(sum(surveyed.leftovers.values()))
        echo(f"  {len(surveyed.leftovers):>9,} left over from interrupted writes, {leftover_bytes}")
    if surveyed.num_young_orders:
        echo(f"  {surveyed.num_young_orders:>9,} encoding orders younger than {grace_hours:g} h: kept")
    if surveyed.num_old_orders:
        order_bytes = bytes_text(sum(surveyed.old_orders.values()))
        echo(f"  {surveyed.num_old_orders:>9,} encoding orders of jobs that failed, {order_bytes}")
    if surveyed.foreign:
        names = ", ".join(surveyed.foreign[:MAX_SHOWN])
        names += ", ..." if len(surveyed.foreign) > MAX_SHOWN else ""
        echo(f"  {len(surveyed.foreign):>9,} from other programs, never touched: {names}")


def _show_packs(cache_dir: Address, packs: Packs, grace_hours: float) -> None:
    if packs.all:
        entries = counted(packs.num_entries, "entry", "entries")
        echo(f"  {len(packs.all):>9,} packs with {entries}, {_pack_bytes(packs.all)}")
    if packs.single:
        single_bytes = bytes_text(sum(packs.single.values()))
        echo(f"  {len(packs.single):>9,} single entries are also in packs, {single_bytes}")
    if packs.young:
        echo(f"  {len(packs.young):>9,} packs not needed but younger than {grace_hours:g} h: kept")
    if packs.old:
        echo(f"  {len(packs.old):>9,} packs not needed, {_pack_bytes(packs.old)}")
    for name in packs.damaged[:MAX_SHOWN]:
        echo(
            f"  the header of a pack is damaged: {cache_folder(cache_dir).where(name)}. Its entries count as "
            "missing. Start the cache jobs of the recipes again, which encode them. Then delete this file."
        )


def _pack_bytes(packs: Sequence[Pack]) -> str:
    return bytes_text(sum(pack.num_bytes for pack in packs))
