"""Bring a stage's cache entries up to date: find missing entries, launch encoders, collect results."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import polars as pl

from pipeline.cache.recipe_entries import LATENT_SHAPE, STAT_COLUMNS, STATS, RecipeEntries, is_unchanged
from pipeline.cache.sealing import seal_new
from pipeline.cache.store import NO_STAT, EntrySpec, EntryState, Kind
from pipeline.cache.used_keys import KeyLists
from pipeline.encoding.checks import ROWS_AT_A_TIME, check_entries
from pipeline.encoding.jobs import (
    Encoding,
    EncodingModel,
    Failure,
    Job,
    PictureJobs,
    Results,
    read_results,
    write_encoding,
    write_jobs,
)
from pipeline.encoding.speed import record_speed
from pipeline.encoding.workers import WORKERS
from pipeline.errors import StoreError, counted
from pipeline.log import Log
from pipeline.processes.launch import Launch
from pipeline.reporting.progress import phase
from pipeline.reporting.reports import Stopwatch
from pipeline.storage.os_errors import require_disk_space

if TYPE_CHECKING:
    pass

Row: TypeAlias = Mapping[str, Any]

GIVEN_SIZE = ("given_height", "given_width")
"""Columns of the size in which a captioning model gets an image."""

_MAX_NAMED = 10

_ENTRY_NAMES: dict[Kind, tuple[str, str]] = {
    "masks": ("mask entry", "mask entries"),
    "pictures": ("picture", "pictures"),
    "features": ("feature entry", "feature entries"),
    "diagnoses": ("measured caption", "measured captions"),
    "influences": ("gradient", "gradients"),
    "captions": ("caption", "captions"),
}
"""Names of entries in the log, one and several, of kinds that are not called an entry."""


@dataclass(frozen=True)
class EntryRequests:
    """Entries that a stage needs, and how to encode the missing ones.

    Attributes:
        kind: Kind of all entries.
        rows: One row per entry: `key` (unique), `num_bytes` (exact size, null if unknown), `about_bytes`
            (estimated size), `STAT_COLUMNS` and the columns in `facts` as the last table recorded them (null
            if it did not), `name`, `cost`, and the columns that `spec` and `job` need.
        settings: Settings for `Encoding.settings`.
        spec: Returns the specification of a row's entry.
        job: Returns the job of a row.
        facts: Further columns of the result: each returns its value from the state of an entry that was read.
        pictures: Latents to decode for the report if processes are launched anyway.
        seal_packs: Whether to copy new entries into packs.
        model_folder: Folder of the model that encodes; None for the base model and its components.
        model: That model by name, for workers on machines without its folder; None if there are none.
    """

    kind: Kind
    rows: pl.DataFrame
    settings: Mapping[str, Any]
    spec: Callable[[Row], EntrySpec]
    job: Callable[[Row], Job]
    facts: Mapping[str, Callable[[EntryState], int | None]]
    pictures: PictureJobs | None = None
    seal_packs: bool = False
    model_folder: Path | None = None
    model: EncodingModel | None = None


@dataclass
class FillResult:
    """Entries that are valid after `fill`, and how they came to be.

    Attributes:
        entries: One row per valid entry: `key`, the `STAT_COLUMNS`, and Int32 columns named in
            `EntryRequests.facts`.
        encoded: Keys of the entries that this run wrote.
        damaged: Keys of the entries that were wrong and encoded again.
        failed: Failures by key.
    """

    entries: pl.DataFrame
    encoded: set[str] = field(default_factory=set[str])
    damaged: set[str] = field(default_factory=set[str])
    failed: dict[str, Failure] = field(default_factory=dict[str, Failure])

    def counters(self, removed: int) -> dict[str, int]:
        """Return the report's counters; they count entries, which samples may share."""
        return {
            "entries": len(self.entries),
            "encoded": len(self.encoded),
            "reused": len(self.entries) - len(self.encoded),
            "removed": removed,
            "failed": len(self.failed),
            "damaged": len(self.damaged),
            "bytes": int(self.entries["entry_bytes"].sum()),
        }


def fill(
    entries: RecipeEntries, requests: EntryRequests, *, launch: Launch, log: Log, watch: Stopwatch
) -> FillResult:
    """Check every requested entry, and encode the missing and wrong ones.

    An entry is trusted while its stat is as recorded; any other is read and verified. Nothing is launched if
    nothing is missing.

    Raises:
        StoreError: The disk is too small or not writable, or an encoded entry is not valid.
        LatentlineError: See `Launch`; entries that were encoded before stay in the cache.
    """
    used = KeyLists(entries.store.address, [requests.rows["key"]], log=log)
    # Before the first entry is checked, so that latentline gc deletes none that was seen as valid.
    used.mark()
    return _Fill(entries, requests, used, launch, log, watch).run()


def encoding_order(rows: pl.DataFrame) -> pl.DataFrame:
    """Sort jobs: probes first, then by falling cost, with jobs of one shape next to each other.

    The rows have `cost`, `name`, `key`, and the `LATENT_SHAPE` or `GIVEN_SIZE` if shapes differ. Their order
    does not matter.
    The probes are the costliest job, the cheapest and the first by name, as far as these differ.
    """
    if rows.is_empty():
        return rows
    shape = [name for name in (*LATENT_SHAPE, *GIVEN_SIZE) if name in rows.columns]
    descending = [True, *(False for _ in shape), False]

    # With falling costs, the greedy `share` gives all ranks about the same cost.
    ordered = rows.sort("cost", *shape, "key", descending=descending).with_row_index("position")

    # With probes first, a broken model or a wrong setting shows within seconds.
    first_by_name = ordered.sort("name", "key")["position"][0]
    probes = list(dict.fromkeys((0, len(ordered) - 1, first_by_name)))
    others = ordered.filter(~pl.col("position").is_in(probes))
    return pl.concat([ordered[probes], others]).drop("position")


@dataclass
class _Fill:
    _entries: RecipeEntries
    _requests: EntryRequests
    _used: KeyLists
    _launch: Launch
    _log: Log
    _watch: Stopwatch

    def __post_init__(self) -> None:
        self._store = self._entries.store
        schema = {"key": pl.String, **STATS, **dict.fromkeys(self._requests.facts, pl.Int32)}
        self._result = FillResult(pl.DataFrame(schema=schema))

    def run(self) -> FillResult:
        # Starting processes takes seconds. If an entry is certainly missing, they start before all
        # entries are checked.
        if self._new_entry_is_missing():
            missing, results = self._encode(self._find_missing)
        else:
            missing, results = self._find_missing(), Results()
            if not missing.is_empty():
                _, results = self._encode(lambda: missing)

        for states in self._check(missing):
            self._collect(states, results)
        if self._result.encoded and self._requests.seal_packs:
            encoded = missing.filter(pl.col("key").is_in(self._result.encoded))
            parts = (part.to_dicts() for part in encoded.iter_slices(ROWS_AT_A_TIME))
            specs = (self._requests.spec(row) for rows in parts for row in rows)
            seal_new(self._store, specs, log=self._log)
        return self._result

    def _new_entry_is_missing(self) -> bool:
        """Return whether the first entry that no table has recorded does not exist."""
        rows = self._requests.rows

        # One request instead of many: a missing entry is certain, a present one still has to be read.
        new_keys = rows.filter(pl.col(STAT_COLUMNS[0]).is_null())["key"]
        stats = self._store.stats(self._requests.kind, new_keys.head(1))
        return any(tuple(stat) == NO_STAT for stat in stats)

    def _find_missing(self) -> pl.DataFrame:
        rows, result = self._requests.rows, self._result
        with phase("comparing cache entries with the last run", log=self._log):
            unchanged = is_unchanged(self._store, self._requests.kind, rows)
        unrecorded = [
            pl.lit(None, pl.Int32).alias(name) for name in self._requests.facts if name not in rows.columns
        ]
        result.entries = rows.filter(unchanged).with_columns(unrecorded).select(result.entries.columns)

        changed = rows.filter(~unchanged)
        is_missing: list[bool] = []
        for states in self._check(changed):
            is_missing += [not state.valid for _, state in states]
            result.damaged |= {row["key"] for row, state in states if state.status == "wrong"}
            self._add_valid(states)
        missing = changed.filter(pl.Series(is_missing, dtype=pl.Boolean))

        num_damaged = len(result.damaged)
        entries = counted(len(rows), *_ENTRY_NAMES.get(self._requests.kind, ("entry", "entries")))
        self._log(
            f"{entries} needed: {len(rows) - len(missing):,} present, "
            f"{len(missing) - num_damaged:,} missing, {num_damaged:,} damaged and encoded again"
        )
        self._log_damaged(missing.filter(pl.col("key").is_in(result.damaged)))
        # The free space of a remote store is unknown.
        if not missing.is_empty() and isinstance(self._store.address, Path):
            require_disk_space(self._store.address, int(missing["about_bytes"].sum()))
        return encoding_order(missing)

    def _check(self, rows: pl.DataFrame) -> Iterator[list[tuple[Row, EntryState]]]:
        for part in check_entries(self._store, rows, self._requests.spec, log=self._log):
            yield [(row, state) for row, _, state in part]

    def _encode(self, find_missing: Callable[[], pl.DataFrame]) -> tuple[pl.DataFrame, Results]:
        """Launch processes, and call `find_missing` for their jobs while they start."""
        kind, own_model = self._requests.kind, self._requests.model_folder
        encoding = Encoding(
            kind=kind,
            model_folder=own_model or self._entries.model_folder,
            store_root=self._store.address,
            settings=self._requests.settings,
            jobs=[],
            component_folders={} if own_model else self._entries.component_folders,
            pictures=self._requests.pictures,
            model=self._requests.model or _encoding_model(self._entries, kind),
            seal_packs=self._requests.seal_packs,
        )
        missing = pl.DataFrame()
        find_s = 0.0

        # Orders are exchanged through files, because the processes may be started by another program, such as
        # accelerate.
        with tempfile.TemporaryDirectory(prefix="latentline-") as folder:

            def write_missing_jobs() -> None:
                nonlocal missing, start_s, find_s
                start_s = time.perf_counter()
                missing = find_missing()
                write_jobs(_LazyJobs(missing, self._requests.job), Path(folder))
                find_s = time.perf_counter() - start_s

            encoding_file = write_encoding(encoding, Path(folder), jobs_follow=True)
            launch_start_s = start_s = time.perf_counter()
            with self._used.kept_marked():
                self._launch(WORKERS[kind], encoding_file, write_missing_jobs)
            launched_s = time.perf_counter() - start_s
            results = read_results(Path(folder))

        # The launch may have waited for other runs before it started its processes.
        self._watch.waited_s += start_s - launch_start_s

        # Launching overlaps with the search for missing entries, which is not start-up. Several processes
        # measured these times, so the difference may be negative.
        startup_s = max(0.0, launched_s - find_s - results.work_s - results.aside_s)
        self._watch.startup_s += startup_s
        self._watch.aside_s += results.aside_s

        # Both are the base of the time in `latentline plan`.
        cost = int(missing.filter(pl.col("key").is_in(results.made))["cost"].sum())
        if cost:
            record_speed(self._entries.machine_state_dir, kind, results.work_s / cost)
            record_speed(self._entries.machine_state_dir, f"start of {kind}", startup_s)
        return missing, results

    def _collect(self, states: list[tuple[Row, EntryState]], results: Results) -> None:
        # The state in the store counts, not what workers report.
        for row, state in states:
            key = row["key"]
            if state.valid:
                if key not in results.present:
                    self._result.encoded.add(key)
            elif key in results.failed:
                self._result.failed[key] = results.failed[key]
            else:
                problem = f"damaged: {state.reason}" if state.status == "wrong" else "missing"
                raise StoreError(
                    f"the cache entry of {self._requests.job(row).name} was written, but now it is {problem}",
                    where=self._store.where(self._requests.spec(row)),
                    fix="check the disk, stop any program that deletes or changes files in cache_dir, and "
                    "start the job again",
                )
        self._add_valid(states)

    def _add_valid(self, states: Iterable[tuple[Row, EntryState]]) -> None:
        rows = [
            (row["key"], *astuple(state.stat), *self._facts(row, state))
            for row, state in states
            if state.stat is not None and state.valid
        ]
        entries = self._result.entries
        self._result.entries = entries.vstack(pl.DataFrame(rows, schema=entries.schema, orient="row"))

    def _facts(self, row: Row, state: EntryState) -> list[int | None]:
        values = {name: fact(state) for name, fact in self._requests.facts.items()}
        # The checksum finds damage. Whoever may write a shared cache may have written any metadata.
        wrong = {name: value for name, value in values.items() if not _is_fact(value)}
        if wrong:
            place = state.place_in_pack or self._store.where(self._requests.spec(row))
            raise StoreError(
                f"a cache entry has metadata that Latentline does not write: {str(wrong)[:200]}",
                where=place,
                fix="delete the file and start the job again, which encodes the entry; check who may write "
                "the cache",
            )
        return list(values.values())

    def _log_damaged(self, damaged: pl.DataFrame) -> None:
        for row in damaged.head(_MAX_NAMED).iter_rows(named=True):
            spec = self._requests.spec(row)
            state = self._store.check(spec)
            where = state.place_in_pack or self._store.where(spec)
            self._log(f"damaged entry of {self._requests.job(row).name}: {state.reason} ({where})")


def _is_fact(value: Any) -> bool:
    return value is None or (type(value) is int and 0 <= value < 2**31)


def _encoding_model(entries: RecipeEntries, kind: Kind) -> EncodingModel | None:
    if kind not in ("latents", "text"):
        return None
    recipe = entries.recipe
    settings = recipe.model.model_dump(mode="json")
    return EncodingModel(settings, str(recipe.source), entries.fingerprint(kind))


class _LazyJobs:
    """Jobs of some rows, built one slice at a time."""

    def __init__(self, rows: pl.DataFrame, job: Callable[[Row], Job]) -> None:
        self._rows = rows
        self._job = job

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Job]:
        for part in self._rows.iter_slices(ROWS_AT_A_TIME):
            yield from map(self._job, part.to_dicts())
