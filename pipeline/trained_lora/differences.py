"""How a new run differs from the run before it: in settings, and in which samples."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import polars as pl

from pipeline.storage.tables import read_rows
from pipeline.trained_lora.export.lora_files import LORA_FOLDER, PROVENANCE_FILE, SAMPLES_FILE
from pipeline.trained_lora.fingerprint import with_dataset_names
from pipeline.trained_lora.recipe_facts import Facts
from pipeline.trained_lora.run_folder import RunLayout

MAX_NAMED = 3
"""Maximum number of samples named for each kind of change."""

_COMPARED = ("sample_id", "content_hash", "caption_hashes", "text_keys", "bucket", "latent_keys", "split")
"""Columns of the table of samples that are compared; the columns of references are optional."""

_DIGESTS = {
    "samples.number": "number of images",
    "samples.latents": "latents of images",
    "samples.text": "captions",
    "samples.repeats": "repeats",
    "samples.masks": "masks",
    "samples.references": "references",
    "samples.sliders": "sliders",
    "samples.empty_texts": "embeddings of dropped captions",
}
"""Facts that are hashes over all samples, and what to call a change that no single sample explains."""

_MEMBERS = "samples.datasets"
"""Facts that are hashes over the samples of one dataset, by its name."""

_EVERYTHING = (*_DIGESTS, _MEMBERS)

_ORDER = "samples.ordered_by"
"""Fact of runs in which names of samples decide nothing. Runs of 0.3.0 and earlier do not have it."""


def difference_from_latest(layout: RunLayout, facts: Facts, samples: pl.DataFrame) -> str | None:
    """Return how a new run differs from the run that the recipe had before (FAILURES R11), or None.

    `samples` is the table of the run's samples. An earlier run has such a table next to its facts.
    """
    earlier = latest_other_run(layout)
    if earlier is None:
        return None
    try:
        facts_before = json.loads(earlier.facts.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        return f"how it differs from {earlier.folder.name} is unknown: {earlier.facts}: {err}"

    differences = describe_difference(facts_before, facts, samples_of(earlier), samples)
    return f"it differs from {earlier.folder.name} in {'; '.join(differences)}"


def samples_of(run: RunLayout) -> pl.DataFrame | None:
    """Return the table of a run's samples; None if it is missing, damaged or from an earlier release."""
    # A run can be compared without its samples, and a damaged table must not stop a training.
    table = run.folder / SAMPLES_FILE
    try:
        samples = read_rows(table) if table.is_file() else None
    except (OSError, pl.exceptions.PolarsError):
        return None
    return samples if samples is not None and set(_COMPARED) <= set(samples.columns) else None


def latest_other_run(layout: RunLayout) -> RunLayout | None:
    """Return the run next to this one that was begun or published last, or None."""
    others = [path for path in layout.folder.parent.glob("*/run.json") if path.parent != layout.folder]
    # By time, because run ids have no order.
    times_ns = {path.parent: path.stat().st_mtime_ns for path in others}

    # With a setting changed back, an older run is found again and only published. What a user changes next is
    # a change of that run.
    lora = layout.folder.parents[1] / LORA_FOLDER / PROVENANCE_FILE
    with suppress(OSError, ValueError, KeyError, TypeError):
        published = layout.folder.with_name(json.loads(lora.read_text(encoding="utf-8"))["run"])
        if published in times_ns:
            times_ns[published] = max(times_ns[published], lora.stat().st_mtime_ns)
    newest = max(times_ns, key=times_ns.__getitem__, default=None)
    return None if newest is None else RunLayout(newest)


def describe_difference(
    before: Facts,
    after: Facts,
    samples_before: pl.DataFrame | None = None,
    samples_after: pl.DataFrame | None = None,
) -> list[str]:
    """Return what differs between two runs: named samples, then "<fact> <old> -> <new>" sorted by fact."""
    old, new = dict(_flatten(_with_new_names(before, after))), dict(_flatten(after))
    names = sorted(name for name in {*old, *new} - {_ORDER} if old.get(name) != new.get(name))
    # What a run continues is not a setting; `next_action` says it.
    names = [name for name in names if not name.startswith("continues.")]
    changes = (
        []
        if samples_before is None or samples_after is None
        else _changed_samples(samples_before, samples_after, with_names=_ORDER not in old)
    )

    # A hash over all samples says nothing to a reader, so the samples are named instead.
    explained = {fact for change in changes for fact in change.explains}
    digests = {name: text for name in names if (text := _digest_text(name)) is not None}
    settings = [name for name in names if name not in digests]
    unexplained = [text for name, text in digests.items() if not {name, name.rpartition(".")[0]} & explained]

    texts = [change.text() for change in changes]
    values = [f"{name} {_shorten(old.get(name))} -> {_shorten(new.get(name))}" for name in settings]
    if old.get(_ORDER) == new.get(_ORDER):
        return texts + unexplained + values

    # The hashes of a run of 0.3.0 or earlier contain names, so they differ for the same samples.
    return texts + values or ["samples or repeats; which is unknown for a run of release 0.3.0 or earlier"]


def _digest_text(fact: str) -> str | None:
    """Return what to call a change of a fact that is a hash over samples; None for other facts."""
    if fact.startswith(f"{_MEMBERS}."):
        return f"images of the dataset {fact.removeprefix(f'{_MEMBERS}.')}"
    return _DIGESTS.get(fact)


def _with_new_names(before: Facts, after: Facts) -> Facts:
    """Return the earlier facts with the new names of datasets that have the same samples."""
    old, new = (facts.get("samples", {}).get("datasets", {}) for facts in (before, after))
    new_names = {members: name for name, members in new.items()}
    return with_dataset_names(before, {name: new_names.get(members, name) for name, members in old.items()})


class _Change(NamedTuple):
    """Samples with one kind of change.

    Attributes:
        one: What to call the change of one sample, which its name follows.
        several: What to call the change of several samples.
        names: Names of the samples.
        explains: Facts that such a change changes.
    """

    one: str
    several: str
    names: Sequence[str]
    explains: Sequence[str]

    def text(self) -> str:
        """Return such as "caption of photos/a.jpg", or "5 captions: photos/a.jpg, ... and 2 more"."""
        named = ", ".join(self.names[:MAX_NAMED])
        if len(self.names) == 1:
            return f"{self.one} {named}"
        more = len(self.names) - MAX_NAMED
        return f"{len(self.names):,} {self.several}: {named}" + (f" and {more:,} more" if more > 0 else "")


def _changed_samples(before: pl.DataFrame, after: pl.DataFrame, *, with_names: bool) -> list[_Change]:
    """Return the changes of samples, and with `with_names` also those of their names."""
    added = after.join(before, on="sample_id", how="anti", maintain_order="left")
    removed = before.join(after, on="sample_id", how="anti", maintain_order="left")

    # An image that was removed, and one with the same bytes and captions that was added, is a renamed image.
    content = ["content_hash", "caption_hashes"]
    pairs = removed.unique(content, keep="first", maintain_order=True).join(
        added.unique(content, keep="first", maintain_order=True),
        on=content,
        suffix="_after",
        maintain_order="left",
    )
    added = added.join(pairs, left_on="sample_id", right_on="sample_id_after", how="anti")
    removed = removed.join(pairs, on="sample_id", how="anti")
    new_names = [f"{old} -> {new}" for old, new in pairs.select("sample_id", "sample_id_after").rows()]

    both = before.join(after, on="sample_id", suffix="_after", maintain_order="left")
    entries = ("samples.latents", "samples.masks", "samples.references")
    references = ("samples.references", "samples.text")
    text = ("samples.text", "samples.empty_texts")
    changes = [
        _Change("new image", "new images", added["sample_id"].to_list(), _EVERYTHING),
        _Change("removed image", "removed images", removed["sample_id"].to_list(), _EVERYTHING),
        _Change("renamed image", "renamed images", new_names if with_names else [], _EVERYTHING),
        # The hash of its bytes names an image in every fact.
        _Change("file", "files", _changed(both, "content_hash"), _EVERYTHING),
        _Change("caption of", "captions", _changed(both, "caption_hashes"), text),
        _Change("text embedding of", "text embeddings", _changed(both, "text_keys", "caption_hashes"), text),
        _Change("bucket of", "images in other buckets", _changed(both, "bucket", "content_hash"), entries),
        _Change("latent of", "latents", _changed(both, "latent_keys", "content_hash", "bucket"), entries),
        _Change("holdout membership of", "holdout memberships", _changed(both, "split"), _EVERYTHING),
        _Change("references of", "references", _changed(both, "reference_hashes"), references),
        _Change(
            "latents of references of",
            "latents of references",
            _changed(both, "reference_keys", "reference_hashes"),
            references,
        ),
    ]
    return [change for change in changes if change.names]


def _changed(both: pl.DataFrame, column: str, *causes: str) -> list[str]:
    """Return the samples whose `column` changed while the columns of earlier kinds of change did not."""

    def differs(name: str) -> pl.Expr:
        # Only runs with references have their columns.
        old, new = (
            pl.col(each) if each in both.columns else pl.lit(None, pl.String)
            for each in (name, f"{name}_after")
        )
        return old.ne_missing(new)

    if column not in both.columns and f"{column}_after" not in both.columns:
        return []
    rows = both.filter(differs(column), *(~differs(cause) for cause in causes))
    return rows["sample_id"].to_list()


def _flatten(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shorten(value: object) -> str:
    text = str(value)
    # Hashes and long lists are unreadable in a log line.
    return f"{text[:8]}..." if len(text) >= 32 else text
