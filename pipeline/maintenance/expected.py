"""The work that the next cache job would do on one kind of entries, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.cache.recipe_entries import RecipeEntries, is_unchanged, with_recorded
from pipeline.encoding.checks import check_entries
from pipeline.encoding.speed import recorded_speed
from pipeline.reporting.progress import phase
from pipeline.side_inputs.side_input import VIEW

if TYPE_CHECKING:
    from pipeline.cache.store import EntrySpec, Kind
    from pipeline.side_inputs import SideInput

GEOMETRY = "geometry changed"
DAMAGED, MISSING, MODEL_UNKNOWN = "entry damaged", "entry missing", "model or settings changed"

_INPUT_NAMES = {"vae": "VAE", "encoders": "text encoders", "preprocessing_version": "preprocessing"}

_FILE = (*VIEW, "number")
"""Columns that identify a file of a row of vae_latents."""

Row = Mapping[str, Any]


@dataclass
class Expected:
    """Expected work on one kind of entries. The attributes are keys of `latentline plan --json`.

    Attributes:
        kind: Kind of the entries.
        there: Number of entries that would be reused.
        reasons: Reason to the names of the samples with entries that would be encoded for it.
        num_bytes: Size of the entries to encode. An estimate if an entry's size depends on its caption.
        seconds: Time to encode them, without process start and model loading. None if no speed was measured
            on this machine yet.
    """

    kind: Kind
    there: int = 0
    reasons: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    num_bytes: int = 0
    seconds: float | None = None

    def add(self, reason: str, name: str, num_bytes: int) -> None:
        """Add an entry that would be encoded."""
        self.reasons.setdefault(reason, []).append(name)
        self.num_bytes += num_bytes

    @property
    def to_make(self) -> int:
        """Number of entries that would be encoded."""
        return sum(map(len, self.reasons.values()))


def unusable_entries(
    entries: RecipeEntries,
    expected: Expected,
    requests: pl.DataFrame,
    known: pl.DataFrame | None,
    *,
    spec_of: Callable[[dict[str, Any]], EntrySpec],
) -> Iterator[tuple[dict[str, Any], EntrySpec, str]]:
    """Yield (row, entry, status) for missing and damaged entries, and count valid ones in `expected`."""
    with phase("comparing cache entries with the last run", log=entries.log):
        unchanged = is_unchanged(entries.store, expected.kind, with_recorded(requests, known))

    # As in a job, an entry with an unchanged stat counts as valid without a read.
    expected.there = int(unchanged.sum())
    changed = requests.filter(~unchanged)
    for part in check_entries(entries.store, changed, spec_of, log=entries.log):
        for row, spec, state in part:
            if state.valid:
                expected.there += 1
            else:
                yield row, spec, state.status


def changed_inputs(
    entries: RecipeEntries, spec: EntrySpec, earlier_key: str, inputs: Mapping[str, Any]
) -> str:
    """Return which inputs of the key differ from the inputs in the metadata of the earlier entry."""
    # The key is a hash. Only the entry's metadata tells which input has changed.
    metadata = entries.store.read_metadata(spec.kind, earlier_key)
    if metadata is None or not isinstance(metadata.get("inputs"), dict):
        return MODEL_UNKNOWN
    earlier_inputs = metadata["inputs"]
    changed = [
        _INPUT_NAMES.get(name, name)
        for name, value in inputs.items()
        if name != "caption"
        # The metadata are JSON, which has no tuples.
        and earlier_inputs.get(name) != (list(value) if isinstance(value, tuple) else value)
    ]
    return f"{', '.join(changed)} changed" if changed else MODEL_UNKNOWN


def estimate_seconds(entries: RecipeEntries, expected: Expected, *, cost: int) -> None:
    """Set `seconds` from the start of the encoders and the time per cost that this machine measured."""
    if cost == 0:
        expected.seconds = 0.0
        return
    speed = recorded_speed(entries.machine_state_dir, expected.kind)
    startup_s = recorded_speed(entries.machine_state_dir, f"start of {expected.kind}") or 0.0
    expected.seconds = None if speed is None else startup_s + speed * cost


def expect_side_input(
    entries: RecipeEntries, side_input: SideInput, requests: pl.DataFrame, known: pl.DataFrame | None
) -> Expected:
    """Return the work on the entries of a side input, as for latents.

    `requests` are the rows of vae_latents as the job would request them, and `known` is the table of the last
    run.
    """
    recorded = side_input.recorded(known)
    earlier = {tuple(row[name] for name in _FILE): row for row in recorded.iter_rows(named=True)}

    # An entry that is also a latent of a sample is not counted again.
    rows = side_input.entry_rows(entries, requests).join(
        requests, on="key", how="anti", maintain_order="left"
    )
    rows = side_input.with_num_bytes(entries, rows.unique("key", keep="first", maintain_order=True))

    expected, num_pixels = Expected(side_input.kind), 0
    for row, spec, status in unusable_entries(
        entries, expected, rows, recorded, spec_of=partial(side_input.spec, entries)
    ):
        before = earlier.get(tuple(row[name] for name in _FILE))
        reason = DAMAGED if status == "wrong" else _side_input_reason(entries, side_input, row, spec, before)
        name = f"{row['sample_id']}, {side_input.label(row)}" if side_input.several else row["sample_id"]
        expected.add(reason, name, spec.file_bytes)
        num_pixels += row["target_height"] * row["target_width"]

    # The VAE's time depends on the number of pixels. Masks are encoded without it, in about equal time each.
    estimate_seconds(entries, expected, cost=num_pixels if expected.kind == "latents" else expected.to_make)
    return expected


def _side_input_reason(
    entries: RecipeEntries, side_input: SideInput, row: Row, spec: EntrySpec, earlier: Row | None
) -> str:
    if earlier is None:
        return f"new {side_input.name}"
    if earlier["content_hash"] != row["content_hash"]:
        return f"{side_input.name} changed"
    if earlier["key"] == spec.key:
        return MISSING
    if side_input.only_geometry and row.get("decoding") is None:
        return GEOMETRY
    return changed_inputs(entries, spec, earlier["key"], side_input.inputs(entries, row))
