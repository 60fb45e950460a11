"""Which entries are missing or damaged, and having them made: what both cache stages have in common."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from pipeline.encode.order import Beside, Job, Order, Results, read_results, write_order
from pipeline.encode.outcome import Failure
from pipeline.entries import STAT_COLUMNS, Entries, stat_columns, unchanged, with_recorded
from pipeline.errors import StoreError
from pipeline.launching import Launch
from pipeline.registry import note_speed, register
from pipeline.reports import Log, Stopwatch
from pipeline.store import EntryState, Kind, Store

ENTRY_MODULE = "pipeline.entrypoints.encode"
_MAX_NAMED = 10
_SPARE_BYTES = 64 * 2**20
"""Left free on the disk beyond what the entries need."""


@dataclass
class Made:
    """How the wanted entries came to be there.

    Attributes:
        entries: Of each key whose entry is valid now: `key` and the `STAT_COLUMNS`.
        metadata: By key, of the entries that were read whole.
        shapes: Of their tensors, by key and name.
        encoded: Keys whose entries this run put in place.
        damaged: Keys whose entries were there and wrong; part of those that were made again.
        failed: Keys without an entry, and why.
    """

    entries: pl.DataFrame
    metadata: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    shapes: dict[str, Mapping[str, tuple[int, ...]]] = field(
        default_factory=dict[str, Mapping[str, tuple[int, ...]]]
    )
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


class Maker:
    """Brings the entries of one stage up to date, starting a process only if one is missing."""

    def __init__(self, entries: Entries, kind: Kind, launch: Launch, *, log: Log, watch: Stopwatch) -> None:
        """For entries of one kind, and the stage that `watch` times; what is found and done goes to `log`."""
        self._entries = entries
        self._kind: Kind = kind
        self._launch = launch
        self._log = log
        self._watch = watch

    def make(
        self,
        wanted: pl.DataFrame,
        jobs_of: Callable[[Sequence[str]], list[Job]],
        *,
        known: pl.DataFrame | None,
        settings: Mapping[str, Any],
        beside: Beside | None = None,
    ) -> Made:
        """Look at every entry, and make those that are missing or wrong.

        Args:
            wanted: `key`, each once; `num_bytes`, the exact size of its file, null where nobody knows it yet;
                `about_bytes`, an estimate for these. The output folder is registered as needing these.
            jobs_of: What has to be done for some keys, in their order; asked of those in doubt only.
            known: The last table: an entry is trusted as long as its stat is as it says.
            settings: As `Order.settings`.
            beside: As `Order.beside`; nothing is launched for its sake.

        Raises:
            StoreError: The disk is too small or not writable, or an entry that was made is not valid.
            LatentlineError: As `Launch`; what was made before stays.
        """
        store, recipe = self._entries.store, self._entries.recipe
        register(store.root, recipe.output_dir, recipe=recipe.name, kind=self._kind, keys=wanted["key"])
        looked_at = with_recorded(wanted, known)
        same = unchanged(store, self._kind, looked_at)
        sound = looked_at.filter(same).select("key", *STAT_COLUMNS)
        jobs = jobs_of(looked_at.filter(~same)["key"].to_list())
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            checked = pool.map(lambda job: store.check(job.spec), jobs)
            states = {job.spec.key: state for job, state in zip(jobs, checked, strict=True)}
        missing = [job for job in jobs if not states[job.spec.key].valid]
        made = Made(sound, damaged={key for key, state in states.items() if state.status == "wrong"})
        self._say(len(wanted), missing, states)
        if missing:
            about = wanted.filter(pl.col("key").is_in([job.spec.key for job in missing]))["about_bytes"].sum()
            _require_space(store.root, int(about))
            results = self._launched(missing, settings, beside)
            for job in missing:
                states[job.spec.key] = store.check(job.spec)
                _settle(job, states[job.spec.key], results=results, made=made, store=store)
        return _with_states(made, states)

    def _launched(
        self, missing: Sequence[Job], settings: Mapping[str, Any], beside: Beside | None
    ) -> Results:
        store = self._entries.store
        model = self._entries.family
        order = Order(self._kind, model.folder, store.root, settings, missing, model.elsewhere, beside)
        with tempfile.TemporaryDirectory(prefix="latentline-") as folder:
            file = write_order(order, Path(folder))
            started_s = time.perf_counter()
            self._launch(ENTRY_MODULE, file)
            results = read_results(Path(folder))
            launched_s = time.perf_counter() - started_s
        self._watch.startup_s += max(0.0, launched_s - results.work_s - results.aside_s)
        self._watch.aside_s += results.aside_s
        cost = sum(job.cost for job in missing if job.spec.key in results.made)
        if cost:
            note_speed(store.root, self._kind, results.work_s / cost)
        return results

    def _say(self, num_wanted: int, missing: Sequence[Job], states: Mapping[str, EntryState]) -> None:
        wrong = [job for job in missing if states[job.spec.key].status == "wrong"]
        self._log(
            f"{num_wanted:,} entries wanted, {num_wanted - len(missing):,} are there, "
            f"{len(missing) - len(wrong):,} are missing, {len(wrong):,} are damaged and made again"
        )
        for job in wrong[:_MAX_NAMED]:
            path, reason = self._entries.store.path(job.spec), states[job.spec.key].reason
            self._log(f"damaged entry of {job.name}: {reason} ({path})")


def _with_states(made: Made, states: Mapping[str, EntryState]) -> Made:
    """`made` with the entries that were looked at, as they are at last."""
    rows: list[dict[str, Any]] = []
    for key, state in states.items():
        if not state.valid:
            continue
        assert state.stat is not None
        rows.append({"key": key, **stat_columns(state.stat)})
        if state.metadata is not None and state.shapes is not None:
            made.metadata[key], made.shapes[key] = state.metadata, state.shapes
    schema = pl.Schema({"key": pl.String, **dict.fromkeys(STAT_COLUMNS, pl.Int64)})
    made.entries = pl.concat([made.entries.cast(schema), pl.DataFrame(rows, schema=schema)])
    return made


def _settle(job: Job, state: EntryState, *, results: Results, made: Made, store: Store) -> None:
    """Note how one job ended; what is in the store counts, and not what a process said."""
    key = job.spec.key
    if state.valid:
        if key not in results.present:
            made.encoded.add(key)
        return
    if key not in results.failed:
        raise StoreError(
            f"the entry of {job.name} was to be made and is {state.status}: {state.reason or 'no file'}",
            where=str(store.path(job.spec)),
            fix="see that no other program changes cache_dir and that its disk is sound, and start again",
        )
    made.failed[key] = results.failed[key]


def _require_space(root: Path, needed_bytes: int) -> None:
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes + _SPARE_BYTES:
        raise StoreError(
            f"the missing entries need {needed_bytes:,} bytes and the disk has {free:,} free",
            where=str(root),
            fix="free some space there, or set cache_dir to another disk",
        )
