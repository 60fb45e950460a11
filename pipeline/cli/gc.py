"""`latentline gc`: list caches or training runs, and delete what no job has used for a while, or old runs."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import polars as pl

from pipeline.cache.backends import cache_folder
from pipeline.cache.used_keys import RUNNING_S
from pipeline.cli.conventions import RECIPE, bytes_text, echo, log_to_stderr, reported_recipes
from pipeline.cli.json_output import OPTION, give, is_json
from pipeline.cli.run import HOME_VARIABLE, dagster_home
from pipeline.errors import RecipeError, StoreError, counted
from pipeline.maintenance.gc import KEEP_S, Survey, delete, needed_keys, survey
from pipeline.maintenance.gc_packs import Pack, Packs
from pipeline.maintenance.old_runs import (
    RunSurvey,
    delete_leftover,
    delete_run,
    delete_state,
    survey_runs,
)
from pipeline.maintenance.remote_runs import RemoteRuns
from pipeline.outputs.folder import outputs_of
from pipeline.processes.launch import python_path
from pipeline.recipe import Recipe, RecipeFolder
from pipeline.storage.addresses import Address, Url, absolute

MAX_SHOWN = 10
"""Maximum number of foreign files shown."""

HISTORY_MODULE = "resources.old_dagster_runs"
"""Module that deletes runs of Dagster. It imports Dagster, so this package only starts it by name."""

_DAY_S, _HOUR_S = 24 * 3600.0, 3600.0


class _Age(click.ParamType[float]):
    """An age in days or hours, such as `30d` or `12h`, as seconds."""

    name = "age"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([dh])", str(value))
        if match is None:
            self.fail(
                f"an age must be a number of days or hours, such as 30d or 12h, got {value}", param, ctx
            )
        return float(match[1]) * (_DAY_S if match[2] == "d" else _HOUR_S)


def _refuse(ctx: click.Context, param: click.Parameter, value: object) -> None:
    """Reject an option of version 0.2, and name what replaces it."""
    if value:
        raise click.UsageError(
            f"{param.opts[0]} no longer exists: gc deletes what no job has used for --keep (30d by default). "
            "To keep only what the recipes need, pass --keep 0d.",
            ctx,
        )


@click.command(short_help="List and delete unused cache entries or old runs.")
@click.argument("recipes", metavar="[RECIPE]...", nargs=-1, type=RECIPE)
@click.option(
    "--delete", "do_delete", is_flag=True, help="Delete unused files. By default they are only listed."
)
@click.option(
    "--keep",
    "keep_s",
    type=_Age(),
    metavar="AGE",
    help="Keep cache entries that were used or written within this time, in days or hours, such as 12h. The "
    "default is 30d. With 0d, only entries that recipes of the recipes folder need are kept, and entries of "
    f"running jobs: everything used or written within {RUNNING_S / 3600:.0f} hours.",
)
@click.option(
    "--keep-runs",
    "num_kept_runs",
    type=click.IntRange(0),
    metavar="N",
    help="List training runs instead of cache entries, and keep the newest N of each output folder.",
)
@click.option(
    "--dagster-runs",
    "num_dagster_runs",
    type=click.IntRange(0),
    metavar="N",
    help="List runs in Dagster's history instead, which the UI shows, and keep the newest N of each job.",
)
@click.option(
    "--cache-dir",
    "cache_dirs",
    multiple=True,
    help="Cache to examine, a folder or an address as in a recipe. Repeat it for several. By default the "
    "caches of the given recipes, or of all.",
)
@click.option("--forget", multiple=True, hidden=True, expose_value=False, callback=_refuse)
@click.option("--grace-hours", hidden=True, expose_value=False, callback=_refuse)
def command(
    recipes: tuple[Recipe, ...],
    *,
    do_delete: bool,
    keep_s: float | None,
    num_kept_runs: int | None,
    num_dagster_runs: int | None,
    cache_dirs: tuple[str, ...],
) -> None:
    """List cache entries that no job has used for a while, or old training runs; delete them with --delete.

    By default, the command examines the caches of the given recipes, or of all. Each job records in the cache
    which entries it uses, on whatever machine, and a training continues to do so while it runs. An entry is
    deleted if no job has used it for --keep, and if it was not written within that time either. Deleted
    entries are encoded again by the next job that needs them.

    The files of entries that are also in packs are not needed (see latentline pack). Before one is deleted,
    its copy in the pack is read and verified. A pack is deleted if no job has used any of its entries.

    With --keep-runs N, the command examines the training runs of these recipes instead. A run is kept if it
    is one of the newest N, if its LoRA is in lora/, if start_from of a recipe or of a run in training names
    one of its files, if it has won the last sweep, or if it is being trained. All other runs are old;
    deleting one deletes its checkpoints and LoRA files too. Other variants of the last sweep keep their LoRA
    files and lose the state from which they could be resumed.

    With --dagster-runs N, it examines Dagster's history (DAGSTER_HOME, or .dagster in the project): runs with
    their logs and events, and no files of recipes. Runs in progress stay, and so do the ones that Dagster's
    UI needs for the current state of an asset and for its pictures.
    """
    if num_dagster_runs is not None:
        if recipes or cache_dirs or keep_s is not None or num_kept_runs is not None:
            raise click.UsageError("--dagster-runs excludes recipes, --keep, --keep-runs and --cache-dir.")
        # A folder resources/ in the working directory must not hide the module.
        arguments = ["-P", "-m", HISTORY_MODULE, str(num_dagster_runs), *(["--delete"] if do_delete else [])]
        arguments += [OPTION] if is_json() else []
        environment = {**os.environ, HOME_VARIABLE: str(dagster_home()), "PYTHONPATH": python_path()}
        os.execve(sys.executable, [sys.executable, *arguments], environment)  # noqa: S606 - no shell is wanted
    if num_kept_runs is not None:
        if cache_dirs or keep_s is not None:
            raise click.UsageError("--keep-runs excludes --keep and --cache-dir, which are about caches.")
        _collect_runs(recipes, num_kept_runs, do_delete=do_delete)
        return
    if recipes and cache_dirs:
        raise click.UsageError("Pass recipes or --cache-dir, not both.")

    given = [absolute(text, Path()) for text in cache_dirs]
    folder = reported_recipes() if keep_s == 0 or not (recipes or given) else RecipeFolder([], [])
    # A recipe given by its path may be outside the folder.
    all_recipes = {recipe.source: recipe for recipe in (*recipes, *folder.recipes)}.values()
    caches = given or sorted({recipe.cache_dir for recipe in recipes or all_recipes}, key=str)
    if not caches:
        echo("no recipes were found, so no cache is known; pass one with --cache-dir")
    if keep_s == 0 and do_delete:
        _require_readable(
            folder,
            "nothing was deleted, because a recipe with mistakes may need entries",
            fix="correct the recipe, move its file to another folder, or pass --keep with a longer time",
        )

    # At least the age up to which a list of used entries may belong to a running job.
    age_s = max(KEEP_S if keep_s is None else keep_s, RUNNING_S)
    results: list[dict[str, Any]] = []
    for cache_dir in caches:
        needed = _keys_of_recipes(all_recipes, cache_dir) if keep_s == 0 else None
        surveyed = survey(cache_dir, keep_s=age_s, recipe_keys=needed)
        if given:
            _require_cache(cache_dir, surveyed)
        _show(cache_dir, surveyed, age_s)
        packs = surveyed.packs
        has_garbage = bool(surveyed.orphans or surveyed.leftovers or surveyed.old_encodings)
        has_garbage |= bool(packs.single or packs.old or surveyed.expired_lists)
        results.append({"cache_dir": cache_dir, **_cache_values(surveyed), "deleted": None})
        if has_garbage and do_delete:
            num_files, num_bytes = delete(cache_dir, surveyed, log=log_to_stderr)
            results[-1]["deleted"] = {"files": num_files, "bytes": num_bytes}
            echo(f"  deleted {counted(num_files, 'file')}, {bytes_text(num_bytes)}")
        elif has_garbage:
            echo("  nothing was deleted; run latentline gc --delete to delete the unused files")
    give({"caches": results})


def _cache_values(surveyed: Survey) -> dict[str, Any]:
    """Return what `_show` prints; files that can be deleted have their sizes in bytes."""
    packs = surveyed.packs
    return {
        "entries": surveyed.entries,
        "entry_bytes": surveyed.entry_bytes,
        "used": surveyed.num_used,
        "unused": surveyed.orphans,
        "young": surveyed.young,
        "packs": len(packs.all),
        "packed_singles": packs.single,
        "unused_packs": {pack.file.name: pack.num_bytes for pack in packs.old},
        "damaged_packs": packs.damaged,
        "expired_lists": surveyed.expired_lists,
        "leftovers": surveyed.leftovers,
        "old_encodings": surveyed.old_encodings,
        "foreign": surveyed.foreign,
    }


def _keys_of_recipes(recipes: Iterable[Recipe], cache_dir: Address) -> list[pl.Series]:
    groups: list[pl.Series] = []
    for recipe in recipes:
        if recipe.cache_dir == cache_dir:
            # The tables name the entries, and another machine may have written newer ones.
            outputs_of(recipe, log_to_stderr).fetch("tables/")
            groups += needed_keys(recipe, log=log_to_stderr)
    return groups


def _require_readable(folder: RecipeFolder, what: str, *, fix: str) -> None:
    # What a recipe with mistakes needs is unknown.
    if folder.broken:
        names = ", ".join(broken.name for broken in folder.broken)
        raise RecipeError(f"{what}: {names}", where=str(folder.broken[0].file.parent), fix=fix)


def _collect_runs(recipes: tuple[Recipe, ...], num_kept: int, *, do_delete: bool) -> None:
    folder = reported_recipes()
    if do_delete:
        _require_readable(
            folder,
            "no run was deleted, because start_from of a recipe with mistakes may name one",
            fix="correct the recipe, or move its file to another folder",
        )

    chosen = recipes or tuple(folder.recipes)
    if not chosen:
        echo("no recipes were found, so no run is known")
    results: list[dict[str, Any]] = []
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
        runs = [asdict(run) for run in surveyed.runs]
        leftovers = {str(folder): size for folder, size in surveyed.leftovers.items()}
        deleted = {"folders": num_folders, "bytes": num_bytes} if num_folders and do_delete else None
        results.append({"runs_dir": surveyed.where, "runs": runs, "leftovers": leftovers, "deleted": deleted})
        if num_folders and do_delete:
            for run in surveyed.old:
                (delete_state if run.keeps_lora else delete_one)(run.folder)
            for leftover in surveyed.leftovers:
                delete_rest(leftover)
            echo(f"  deleted {counted(num_folders, 'folder')}, {bytes_text(num_bytes)}")
        elif num_folders:
            names = "".join(f" {each.name}" for each in recipes)
            again = f"latentline gc{names} --keep-runs {num_kept} --delete"
            echo(f"  nothing was deleted; {again} deletes {bytes_text(num_bytes)}")
    give({"outputs": results})


def _show_runs(surveyed: RunSurvey) -> None:
    total = bytes_text(sum(run.num_bytes for run in surveyed.runs))
    echo(f"{surveyed.where}: {counted(len(surveyed.runs), 'run')}, {total}")
    for run in surveyed.runs:
        changed = datetime.fromtimestamp(run.changed_s, tz=UTC).astimezone()
        old = "old variant of the sweep: keeps its LoRA, and cannot be resumed" if run.keeps_lora else "old"
        fate = f"kept: {run.kept}" if run.kept else old
        size = bytes_text(run.num_bytes)
        echo(f"  {run.folder.name}  {size:>9}  {changed:%Y-%m-%d %H:%M}  {run.state:<24}  {fate}")
    for run in surveyed.incomplete:
        echo(f"  {run.folder.name}  {bytes_text(run.num_bytes):>9}  {run.state}")
    if surveyed.leftovers:
        size = bytes_text(sum(surveyed.leftovers.values()))
        echo(f"  {counted(len(surveyed.leftovers), 'folder')} of interrupted deletions, {size}")


def _require_cache(cache_dir: Address, surveyed: Survey) -> None:
    # An option may name any folder, and a folder with only foreign files cannot be a cache.
    if surveyed.foreign and not surveyed.used.num_lists and not surveyed.entries and not surveyed.packs.all:
        raise StoreError(
            f"not a cache: the folder holds only {counted(len(surveyed.foreign), 'file')} of other programs",
            where=str(cache_dir),
            fix="pass the cache_dir of a recipe, or omit --cache-dir to examine the caches of all recipes",
        )


def _show(cache_dir: Address, surveyed: Survey, age_s: float) -> None:
    entries = counted(surveyed.entries, "entry", "entries")
    echo(f"{cache_dir}: {entries}, {bytes_text(surveyed.entry_bytes)}")
    reason = f"used in the last {_age_text(age_s)}"
    if surveyed.recipe_keys is not None:
        reason = f"needed by recipes of this project, or {reason}"
    echo(f"  {surveyed.num_used:>9,} {reason}")

    orphan_bytes = bytes_text(sum(surveyed.orphans.values()))
    echo(f"  {len(surveyed.orphans):>9,} not used, {orphan_bytes}")
    if surveyed.young and surveyed.is_use_known:
        echo(f"  {surveyed.young:>9,} not used but written in the last {_age_text(age_s)}: kept")
    elif surveyed.young:
        echo(f"  {surveyed.young:>9,} kept, {_unknown_use(surveyed, age_s)}")
    _show_packs(cache_dir, surveyed.packs, age_s)
    if surveyed.expired_lists:
        list_bytes = bytes_text(sum(surveyed.expired_lists.values()))
        echo(f"  {len(surveyed.expired_lists):>9,} old lists of used entries, {list_bytes}")
    if surveyed.leftovers:
        leftover_bytes = bytes_text(sum(surveyed.leftovers.values()))
        echo(f"  {len(surveyed.leftovers):>9,} left over from interrupted writes, {leftover_bytes}")
    if surveyed.num_young_encodings:
        echo(f"  {surveyed.num_young_encodings:>9,} shared encodings younger than a day: kept")
    if surveyed.num_old_encodings:
        encoding_bytes = bytes_text(sum(surveyed.old_encodings.values()))
        echo(f"  {surveyed.num_old_encodings:>9,} shared encodings of jobs that failed, {encoding_bytes}")
    if surveyed.foreign:
        names = ", ".join(surveyed.foreign[:MAX_SHOWN])
        names += ", ..." if len(surveyed.foreign) > MAX_SHOWN else ""
        echo(f"  {len(surveyed.foreign):>9,} from other programs, never touched: {names}")


def _unknown_use(surveyed: Survey, age_s: float) -> str:
    since_s = surveyed.used.since_s
    if since_s is None:
        return "because no job has recorded yet which entries it uses"
    since = datetime.fromtimestamp(since_s, tz=UTC).astimezone()
    until = datetime.fromtimestamp(since_s + age_s, tz=UTC).astimezone()
    return f"because jobs record what they use only since {since:%Y-%m-%d}: at least until {until:%Y-%m-%d}"


def _age_text(age_s: float) -> str:
    is_days = age_s >= 2 * _DAY_S
    return f"{age_s / _DAY_S:g} days" if is_days else f"{age_s / _HOUR_S:g} h"


def _show_packs(cache_dir: Address, packs: Packs, age_s: float) -> None:
    if packs.all:
        entries = counted(packs.num_entries, "entry", "entries")
        echo(f"  {len(packs.all):>9,} packs with {entries}, {_pack_bytes(packs.all)}")
    if packs.single:
        single_bytes = bytes_text(sum(packs.single.values()))
        echo(f"  {len(packs.single):>9,} single entries are also in packs, {single_bytes}")
    if packs.young:
        echo(f"  {len(packs.young):>9,} packs not used but written in the last {_age_text(age_s)}: kept")
    if packs.old:
        echo(f"  {len(packs.old):>9,} packs not used, {_pack_bytes(packs.old)}")
    for name in packs.damaged[:MAX_SHOWN]:
        echo(
            f"  the header of a pack is damaged: {cache_folder(cache_dir).where(name)}. Its entries count as "
            "missing. Start the cache jobs of the recipes again, which encode them. Then delete this file."
        )


def _pack_bytes(packs: Sequence[Pack]) -> str:
    return bytes_text(sum(pack.num_bytes for pack in packs))
