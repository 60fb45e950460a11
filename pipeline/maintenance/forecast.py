"""What the next cache job would encode, and why; nothing is made.

Written is nothing but `fingerprints.json`: hashes of the model's files, so that gigabytes are read once.
The same functions that the job runs are asked: scan, validation, geometry, keys and store.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.aspect_buckets.stage import assign_buckets
from pipeline.cache.requests import RecipeEntries, caption_variants, is_unchanged, with_recorded
from pipeline.cache.store import EntrySpec, Kind
from pipeline.cache.users import recorded_speed
from pipeline.maintenance.plan_gates import ClosedGate, closed_gates, path_gate
from pipeline.raw_images.stage import scan
from pipeline.reporting.reports import Log
from pipeline.text_embeddings.stage import wanted_captions
from pipeline.validated_dataset.stage import validate

if TYPE_CHECKING:
    import polars as pl

    from pipeline.recipe import Recipe
    from pipeline.storage.tables import Tables

NEW, CHANGED, GEOMETRY = "new image", "image changed", "geometry changed"
NEW_CAPTION, CAPTION_CHANGED = "new caption", "caption changed"
DAMAGED, MISSING, MODEL_UNKNOWN = "entry damaged", "entry missing", "model or settings changed"

_GEOMETRY_COLUMNS = (
    "resized_height",
    "resized_width",
    "crop_top",
    "crop_left",
    "target_height",
    "target_width",
)
_STAGES = ("raw_images", "validated_dataset", "aspect_buckets")

_INPUT_NAMES = {"vae": "VAE", "encoders": "text encoders", "preprocessing_version": "preprocessing"}

Row = Mapping[str, Any]


@dataclass
class Expected:
    """What would happen to one kind of entries.

    Attributes:
        kind: Of the entries.
        there: Entries that would be used as they are.
        reasons: Why entries would be made: reason to the names of what asks for them, an entry each.
        num_bytes: Of the entries that would be made; an estimate where they are as long as their captions.
        seconds: That making them would take, from the last measurement on this machine; None where there is
            none. Process start and model loading are not in it.
    """

    kind: Kind
    there: int = 0
    reasons: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    num_bytes: int = 0
    seconds: float | None = None

    def add(self, why: str, name: str, num_bytes: int) -> None:
        """One more entry that would be made."""
        self.reasons.setdefault(why, []).append(name)
        self.num_bytes += num_bytes

    @property
    def to_make(self) -> int:
        """Number of entries that would be made."""
        return sum(map(len, self.reasons.values()))


@dataclass(frozen=True)
class Forecast:
    """The next cache job.

    Attributes:
        samples: That it would keep.
        rejected: That it would reject, by reason.
        gone: Samples of the last tables that are no more.
        closed: Gates at which the job would stop, before anything is encoded. Where `path_isolation` is one,
            it is the only one, and nothing else was looked at.
        latents: Their entries.
        text: Captions' entries.
    """

    samples: int
    rejected: Mapping[str, int]
    gone: Sequence[str]
    closed: Sequence[ClosedGate]
    latents: Expected
    text: Expected


def forecast(recipe: Recipe, tables: Tables, *, log: Log) -> Forecast:
    """What `<recipe>_cache` would do now.

    Raises:
        DatasetError: A dataset's folder is missing, or cannot be listed.
        ModelError: The base model cannot be found.
        StoreError: The cache cannot be read.
    """
    paths = path_gate(recipe)
    if paths is not None:
        return Forecast(0, {}, [], [paths], Expected("latents"), Expected("text"))
    raw = scan(recipe, tables, log=log, remember=False)
    valid = validate(recipe, raw.table, tables, log=log, remember=False)
    buckets = assign_buckets(recipe, valid.table, log=lambda _: None)
    rejected: dict[str, int] = defaultdict(int)
    for result in (raw, valid, buckets):
        for reason in result.rejected["reason"]:
            rejected[reason] += 1
    entries = RecipeEntries(recipe)
    latents, text = tables.read_previous("vae_latents"), tables.read_previous("text_embeddings")
    before: set[str] = set(latents["sample_id"]) if latents is not None else set()
    return Forecast(
        buckets.table["sample_id"].n_unique(),
        dict(rejected),
        sorted(before - set(buckets.table["sample_id"])),
        closed_gates(recipe, dict(zip(_STAGES, (raw, valid, buckets), strict=True))),
        _latents(entries, entries.latent_requests(buckets.table), latents),
        _text(entries, valid.table, text),
    )


def _latents(entries: RecipeEntries, rows: pl.DataFrame, known: pl.DataFrame | None) -> Expected:
    wanted = rows.unique("key", keep="first", maintain_order=True)
    before = {(row["sample_id"], row["flipped"]): row for row in _rows(known)}
    before |= {(row["sample_id"], row["bucket"], row["flipped"]): row for row in _rows(known)}
    expected, cost = Expected("latents"), 0
    for row, spec, status in _unmade(entries, expected, wanted, known, entries.latent_spec):
        name = (row["sample_id"], row["bucket"], row["flipped"])
        earlier = before.get(name) or before.get((row["sample_id"], row["flipped"]))
        why = DAMAGED if status == "wrong" else _why_latent(entries, row, spec, earlier)
        expected.add(
            why, f"{row['sample_id']}, mirrored" if row["flipped"] else row["sample_id"], spec.file_bytes
        )
        cost += row["target_height"] * row["target_width"]
    _estimate(entries, expected, cost)
    return expected


def _rows(table: pl.DataFrame | None) -> list[dict[str, Any]]:
    return [] if table is None else table.to_dicts()


def _unmade(
    entries: RecipeEntries,
    expected: Expected,
    wanted: pl.DataFrame,
    known: pl.DataFrame | None,
    spec_of: Callable[[dict[str, Any]], EntrySpec],
) -> Iterator[tuple[dict[str, Any], EntrySpec, str]]:
    """The rows whose entry is missing or wrong; the others are counted as there."""
    same = is_unchanged(entries.store, expected.kind, with_recorded(wanted, known))
    expected.there = int(same.sum())
    for row in wanted.filter(~same).iter_rows(named=True):
        spec = spec_of(row)
        state = entries.store.check(spec)
        if state.valid:
            expected.there += 1
        else:
            yield row, spec, state.status


def _why_latent(entries: RecipeEntries, row: Row, spec: EntrySpec, earlier: Row | None) -> str:
    if earlier is None:
        return NEW
    if earlier["content_hash"] != row["content_hash"]:
        return CHANGED
    if earlier["key"] == spec.key:
        return MISSING
    if any(earlier[name] != row[name] for name in _GEOMETRY_COLUMNS):
        return GEOMETRY
    return _changed_inputs(entries, spec, earlier["key"], vars(entries.latent_inputs(row)))


def _text(entries: RecipeEntries, valid: pl.DataFrame, known: pl.DataFrame | None) -> Expected:
    captions = caption_variants(valid).select("caption", "sample_id", "variant")
    captions = captions.unique("caption", keep="first", maintain_order=True)
    wanted = entries.text_requests(wanted_captions(entries.recipe, captions["caption"]), known)
    wanted = wanted.join(captions, on="caption", how="left", maintain_order="left")
    before = {(row["sample_id"], row["variant"]): row for row in _rows(known)}
    expected = Expected("text")
    for row, spec, status in _unmade(
        entries, expected, wanted, known, lambda row: entries.text_spec(row["caption"])
    ):
        caption, sample_id = row["caption"], row["sample_id"]
        why = (
            DAMAGED
            if status == "wrong"
            else _why_text(entries, caption, spec, before.get((sample_id, row["variant"])))
        )
        name = f"the sample prompt {caption!r}" if caption else "the empty caption"
        expected.add(why, sample_id or name, row["about_bytes"])
    _estimate(entries, expected, expected.to_make)
    return expected


def _why_text(entries: RecipeEntries, caption: str, spec: EntrySpec, earlier: Row | None) -> str:
    if earlier is None:
        return NEW_CAPTION
    if earlier["caption"] != caption:
        return CAPTION_CHANGED
    if earlier["key"] == spec.key:
        return MISSING
    return _changed_inputs(entries, spec, earlier["key"], vars(entries.text_inputs(caption)))


def _changed_inputs(
    entries: RecipeEntries, spec: EntrySpec, earlier_key: str, inputs: Mapping[str, Any]
) -> str:
    """Which inputs of the key are other than those that the earlier entry's header states."""
    facts = entries.store.read_metadata(spec.kind, earlier_key)
    if facts is None or not isinstance(facts.get("inputs"), dict):
        return MODEL_UNKNOWN
    earlier = facts["inputs"]
    changed = [
        name
        for name, value in inputs.items()
        if name != "caption" and earlier.get(name) != (list(value) if isinstance(value, tuple) else value)
    ]
    return (
        f"{', '.join(_INPUT_NAMES.get(name, name) for name in changed)} changed" if changed else MODEL_UNKNOWN
    )


def _estimate(entries: RecipeEntries, expected: Expected, cost: int) -> None:
    measured = recorded_speed(entries.machine_state_dir, expected.kind)
    expected.seconds = 0.0 if not cost else measured * cost if measured is not None else None
