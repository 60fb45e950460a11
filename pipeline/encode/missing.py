"""Which entries are missing or damaged, and having them made: what both cache stages have in common."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.encode.order import Job, Order, Results, read_results, write_order
from pipeline.encode.outcome import Failure
from pipeline.entries import Entries, recorded_stat
from pipeline.errors import StoreError
from pipeline.launching import Launch
from pipeline.registry import note_speed, register
from pipeline.reports import Log, Stopwatch
from pipeline.store import EntrySpec, EntryStat, EntryState, Kind, Store

ENTRY_MODULE = "pipeline.entrypoints.encode"
_MAX_NAMED = 10
_SPARE_BYTES = 64 * 2**20
"""Left free on the disk beyond what the entries need."""


@dataclass
class Made:
    """How the wanted entries came to be there.

    Attributes:
        states: Of each key whose entry is valid now.
        encoded: Keys whose entries this run put in place.
        damaged: Keys whose entries were there and wrong; part of those that were made again.
        failed: Keys without an entry, and why.
    """

    states: dict[str, EntryState]
    encoded: set[str] = field(default_factory=set[str])
    damaged: set[str] = field(default_factory=set[str])
    failed: dict[str, Failure] = field(default_factory=dict[str, Failure])

    def counters(self, removed: set[str]) -> dict[str, int]:
        """The report's numbers; each counts entries, of which samples may share one."""
        return {
            "entries": len(self.states),
            "encoded": len(self.encoded),
            "reused": len(self.states) - len(self.encoded),
            "removed": len(removed),
            "failed": len(self.failed),
            "damaged": len(self.damaged),
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
        specs: Sequence[EntrySpec],
        job_of: Callable[[EntrySpec], Job],
        *,
        trusted: Mapping[str, EntryStat],
        settings: Mapping[str, Any],
    ) -> Made:
        """Look at every entry, and make those that are missing or wrong.

        Args:
            specs: What is wanted: entries of this maker's kind, each key once. The output folder is
                registered as needing these.
            job_of: What has to be done for an entry; asked of those that are missing only.
            trusted: By key, the stat of entries that were verified earlier.
            settings: As `Order.settings`.

        Raises:
            StoreError: The disk is too small or not writable, or an entry that was made is not valid.
            LatentlineError: As `Launch`; what was made before stays.
        """
        store, recipe = self._entries.store, self._entries.recipe
        keys = (spec.key for spec in specs)
        register(store.root, recipe.output_dir, recipe=recipe.name, kind=self._kind, keys=keys)
        states = {spec.key: store.check(spec, trusted.get(spec.key)) for spec in specs}
        missing = [job_of(spec) for spec in specs if not states[spec.key].valid]
        made = Made(states, damaged={key for key, state in states.items() if state.status == "wrong"})
        self._say(missing, states)
        if not missing:
            return made
        _require_space(store.root, sum(job.spec.file_bytes for job in missing))
        order = Order(self._kind, self._entries.model_folder, store.root, settings, missing)
        results = self._launched(order)
        cost = sum(job.cost for job in missing if job.spec.key in results.made)
        if cost:
            note_speed(store.root, self._kind, results.work_s / cost)
        for job in missing:
            _settle(job, store.check(job.spec), results=results, made=made, store=store)
        return made

    def _launched(self, order: Order) -> Results:
        with tempfile.TemporaryDirectory(prefix="latentline-") as folder:
            file = write_order(order, Path(folder))
            started_s = time.perf_counter()
            self._launch(ENTRY_MODULE, file)
            results = read_results(Path(folder))
            launched_s = time.perf_counter() - started_s
        self._watch.startup_s += max(0.0, launched_s - results.work_s)
        return results

    def _say(self, missing: Sequence[Job], states: Mapping[str, EntryState]) -> None:
        wrong = [job for job in missing if states[job.spec.key].status == "wrong"]
        self._log(
            f"{len(states)} entries wanted, {len(states) - len(missing)} are there, "
            f"{len(missing) - len(wrong)} are missing, {len(wrong)} are damaged and made again"
        )
        for job in wrong[:_MAX_NAMED]:
            path, reason = self._entries.store.path(job.spec), states[job.spec.key].reason
            self._log(f"damaged entry of {job.name}: {reason} ({path})")


def trusted_stats(rows: Sequence[Mapping[str, Any]]) -> dict[str, EntryStat]:
    """By key, the stats that rows of an earlier table recorded."""
    return {row["key"]: recorded_stat(row) for row in rows}


def _settle(job: Job, state: EntryState, *, results: Results, made: Made, store: Store) -> None:
    """Note how one job ended; what is in the store counts, and not what a process said."""
    key = job.spec.key
    made.states[key] = state
    if state.valid:
        if key not in results.present:
            made.encoded.add(key)
        return
    del made.states[key]
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
