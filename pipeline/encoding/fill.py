"""Which entries are missing or damaged, and having them made: what both cache stages have in common."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import polars as pl

from pipeline.cache.requests import STAT_COLUMNS, STATS, RecipeEntries, is_unchanged
from pipeline.cache.store import NO_STAT, EntrySpec, EntryState, Kind
from pipeline.cache.users import record_speed, register_user
from pipeline.encoding.jobs import Beside, Job, Order, Results, read_results, write_jobs, write_order
from pipeline.encoding.outcome import Failure
from pipeline.encoding.turn import in_turn
from pipeline.errors import StoreError, counted
from pipeline.processes.launch import Launch
from pipeline.reporting.reports import Log, Stopwatch
from pipeline.storage.addresses import Address, Url
from pipeline.storage.columns import with_constant
from pipeline.storage.tables import only

Row: TypeAlias = Mapping[str, Any]

WORKERS: dict[Kind, str] = {
    "latents": "pipeline.vae_latents.worker",
    "text": "pipeline.text_embeddings.worker",
}
"""Entry modules of the launched processes."""

_MAX_NAMED = 10
_ROWS_AT_A_TIME = 1024
_ENTRY_SCHEMA = {"key": pl.String, **STATS}
_SPARE_BYTES = 64 * 2**20
"""Left free on the disk beyond what the entries need."""


@dataclass(frozen=True)
class Wanted:
    """The entries that a stage asks for.

    Attributes:
        rows: `key`, each once; `num_bytes`, the exact size of its file, null where nobody knows it yet;
            `about_bytes`, an estimate for these; the `STAT_COLUMNS` and `facts` that the last table recorded,
            null or no columns where it did not; what `in_turn` asks for, and what the functions need.
        spec: What the entry of a row must be.
        job: What has to be done for a row.
        facts: More columns of `Made.entries`: what they are of an entry that was read whole.
        beside: As `Order.beside`; nothing is launched for its sake.
    """

    rows: pl.DataFrame
    spec: Callable[[Row], EntrySpec]
    job: Callable[[Row], Job]
    facts: Mapping[str, Callable[[EntryState], int | None]]
    beside: Beside | None = None


@dataclass
class Made:
    """How the wanted entries came to be there.

    Attributes:
        entries: Of each key whose entry is valid now: `key`, the `STAT_COLUMNS`, and the columns of
            `Wanted.facts`, Int32, as recorded where the entry is as it was.
        encoded: Keys whose entries this run put in place.
        damaged: Keys whose entries were there and wrong; part of those that were made again.
        failed: Keys without an entry, and why.
    """

    entries: pl.DataFrame
    encoded: set[str] = field(default_factory=set[str])
    damaged: set[str] = field(default_factory=set[str])
    failed: dict[str, Failure] = field(default_factory=dict[str, Failure])

    def counters(self, removed: int) -> dict[str, int]:
        """The report's numbers; each counts entries, of which samples may share one."""
        return {
            "entries": len(self.entries),
            "encoded": len(self.encoded),
            "reused": len(self.entries) - len(self.encoded),
            "removed": removed,
            "failed": len(self.failed),
            "damaged": len(self.damaged),
            "bytes": int(self.entries["entry_bytes"].sum()),
        }

    def found(self, states: Iterable[tuple[Row, EntryState]], wanted: Wanted) -> None:
        """Add the valid ones of entries that were looked at."""
        rows = [
            (row["key"], *astuple(state.stat), *(of(state) for of in wanted.facts.values()))
            for row, state in states
            if state.stat is not None and state.valid
        ]
        self.entries = self.entries.vstack(pl.DataFrame(rows, schema=self.entries.schema, orient="row"))


class Maker:
    """Brings the entries of one stage up to date, starting a process only if one is missing.

    Of what is looked at and made, a part at a time is in memory: beside the rows that the stage brings, a
    missing entry costs some hundred bytes here.
    """

    def __init__(
        self, entries: RecipeEntries, kind: Kind, launch: Launch, *, log: Log, watch: Stopwatch
    ) -> None:
        """For entries of one kind, and the stage that `watch` times; what is found and done goes to `log`."""
        self._entries = entries
        self._kind: Kind = kind
        self._launch = launch
        self._log = log
        self._watch = watch

    def make(self, wanted: Wanted, *, settings: Mapping[str, Any]) -> Made:
        """Look at every entry, and make those that are missing or wrong.

        Args:
            wanted: The output folder is registered as needing these. An entry is trusted as long as its stat
                is as recorded.
            settings: As `Order.settings`.

        Raises:
            StoreError: The disk is too small or not writable, or an entry that was made is not valid.
            LatentlineError: As `Launch`; what was made before stays.
        """
        store, recipe, keys = self._entries.store, self._entries.recipe, wanted.rows["key"]
        register_user(store.address, recipe.output_dir, recipe=recipe.name, kind=self._kind, keys=keys)
        made = Made(pl.DataFrame(schema={**_ENTRY_SCHEMA, **dict.fromkeys(wanted.facts, pl.Int32)}))
        if self._one_is_missing(wanted):
            missing, results = self._launched(lambda: self._found(wanted, made), wanted, settings)
        else:
            missing, results = self._found(wanted, made), Results()
            if not missing.is_empty():
                _, results = self._launched(lambda: missing, wanted, settings)
        for part in self._looked_at(missing, wanted):
            self._settle(part, wanted, results=results, made=made)
        return made

    def _one_is_missing(self, wanted: Wanted) -> bool:
        """Whether the first entry that no table knows is not there: then processes are started at once."""
        is_new = wanted.rows[STAT_COLUMNS[0]].is_null()
        stats = self._entries.store.stats(self._kind, wanted.rows["key"].filter(is_new).head(1))
        return any(tuple(stat) == NO_STAT for stat in stats)

    def _found(self, wanted: Wanted, made: Made) -> pl.DataFrame:
        """The rows whose entry is missing or wrong; the others are noted in `made`.

        Raises:
            StoreError: The disk has no room for the missing ones.
        """
        store, rows = self._entries.store, wanted.rows
        same = is_unchanged(store, self._kind, rows)
        reused = only(rows, same)
        for name in wanted.facts.keys() - set(rows.columns):
            reused = with_constant(reused, name, None, pl.Int32)
        made.entries = reused.select(made.entries.columns)
        missing = self._missing(rows.filter(~same), wanted, made)
        damaged = len(made.damaged)
        self._log(
            f"{counted(len(rows), 'entry', 'entries')} wanted: {len(rows) - len(missing):,} there, "
            f"{len(missing) - damaged:,} missing, {damaged:,} damaged and made again"
        )
        self._name_damaged(missing.filter(pl.col("key").is_in(made.damaged)), wanted)
        if not missing.is_empty():
            _require_space(store.address, int(missing["about_bytes"].sum()))
        return in_turn(missing)

    def _missing(self, doubtful: pl.DataFrame, wanted: Wanted, made: Made) -> pl.DataFrame:
        """Those of the rows whose entry is missing or wrong; the others are noted as found."""
        lacking: list[bool] = []
        for part in self._looked_at(doubtful, wanted):
            lacking += [not state.valid for _, state in part]
            made.damaged |= {row["key"] for row, state in part if state.status == "wrong"}
            made.found(part, wanted)
        return doubtful.filter(pl.Series(lacking, dtype=pl.Boolean))

    def _looked_at(self, rows: pl.DataFrame, wanted: Wanted) -> Iterator[list[tuple[Row, EntryState]]]:
        """Each row with its entry's state, some rows at a time, on all cores."""
        store = self._entries.store
        with ThreadPoolExecutor(store.threads) as pool:
            for part in rows.iter_slices(_ROWS_AT_A_TIME):
                named = part.to_dicts()
                states = pool.map(store.check, map(wanted.spec, named))
                yield list(zip(named, states, strict=True))

    def _launched(
        self, find: Callable[[], pl.DataFrame], wanted: Wanted, settings: Mapping[str, Any]
    ) -> tuple[pl.DataFrame, Results]:
        """The rows that `find` finds, while processes start that make their entries, and what those said."""
        model, store = self._entries.family, self._entries.store
        order = Order(self._kind, model.folder, store.address, settings, [], model.replaced, wanted.beside)
        found: list[pl.DataFrame] = []
        found_s: list[float] = []
        with tempfile.TemporaryDirectory(prefix="latentline-") as folder:

            def meanwhile() -> None:
                begun_s = time.perf_counter()
                found.append(find())
                write_jobs(_Jobs(found[0], wanted.job), Path(folder))
                found_s.append(time.perf_counter() - begun_s)

            file = write_order(order, Path(folder), jobs_follow=True)
            started_s = time.perf_counter()
            self._launch(WORKERS[self._kind], file, meanwhile)
            results = read_results(Path(folder))
            launched_s = time.perf_counter() - started_s
        missing = found[0]
        self._watch.startup_s += max(0.0, launched_s - found_s[0] - results.work_s - results.aside_s)
        self._watch.aside_s += results.aside_s
        cost = int(missing.filter(pl.col("key").is_in(results.made))["cost"].sum())
        if cost:
            record_speed(self._entries.machine_state_dir, self._kind, results.work_s / cost)
        return missing, results

    def _name_damaged(self, damaged: pl.DataFrame, wanted: Wanted) -> None:
        store = self._entries.store
        for row in damaged.head(_MAX_NAMED).iter_rows(named=True):
            spec = wanted.spec(row)
            reason = store.check(spec).reason
            self._log(f"damaged entry of {wanted.job(row).name}: {reason} ({store.where(spec)})")

    def _settle(
        self, part: list[tuple[Row, EntryState]], wanted: Wanted, *, results: Results, made: Made
    ) -> None:
        """Note how some jobs ended; what is in the store counts, and not what a process said."""
        for row, state in part:
            key = row["key"]
            if state.valid:
                if key not in results.present:
                    made.encoded.add(key)
            elif key in results.failed:
                made.failed[key] = results.failed[key]
            else:
                problem = f"{state.status}: {state.reason or 'no file'}"
                raise StoreError(
                    f"the entry of {wanted.job(row).name} was to be made and is {problem}",
                    where=self._entries.store.where(wanted.spec(row)),
                    fix="see that no other program changes cache_dir and its disk is sound, and start again",
                )
        made.found(part, wanted)


class _Jobs:
    """The jobs of some rows, each made when its turn comes."""

    def __init__(self, rows: pl.DataFrame, job: Callable[[Row], Job]) -> None:
        self._rows = rows
        self._job = job

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Job]:
        for part in self._rows.iter_slices(_ROWS_AT_A_TIME):
            yield from map(self._job, part.to_dicts())


def _require_space(root: Address, needed_bytes: int) -> None:
    """Nothing where the disk has room, or where nobody can say: elsewhere."""
    if isinstance(root, Url):
        return
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes + _SPARE_BYTES:
        raise StoreError(
            f"the missing entries need {needed_bytes:,} bytes and {_SPARE_BYTES:,} are to stay free; "
            f"the disk has {free:,} free",
            where=str(root),
            fix="free some space there, or set cache_dir to another disk",
        )
