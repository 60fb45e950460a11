"""How a new run differs from an earlier one: settings with their values, samples with their names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pipeline.trained_lora.differences import describe_difference, difference_from_latest
from pipeline.trained_lora.fingerprint import write_facts
from pipeline.trained_lora.run_folder import RunLayout

NO_SAMPLES = pl.DataFrame()


def run_at(
    folder: Path, facts: dict[str, Any], *, time_s: int = 1, samples: pl.DataFrame | None = None
) -> None:
    """Write the facts and the table of samples of a run."""
    layout = RunLayout(folder)
    folder.mkdir()
    write_facts(layout, facts)
    os.utime(layout.facts, ns=(0, 10**9 * time_s))
    if samples is not None:
        samples.write_parquet(folder / "samples.parquet")


def test_a_new_run_is_compared_with_the_most_recent_other_one(tmp_path: Path) -> None:
    for number, (run, time_s) in enumerate({"aa": 2, "cc": 1, "bb": 3, "new": 4}.items()):
        run_at(tmp_path / run, {"plan": {"seed": number, "name": "x" * 31, "hash": run * 16}}, time_s=time_s)
    facts = {"plan": {"seed": 3, "name": "y" * 31, "hash": "d" * 32}}
    assert difference_from_latest(RunLayout(tmp_path / "new"), facts, NO_SAMPLES) == (
        "it differs from bb in "
        f"plan.hash bbbbbbbb... -> dddddddd...; plan.name {'x' * 31} -> {'y' * 31}; plan.seed 2 -> 3"
    )


def test_a_new_run_is_compared_with_an_older_one_that_was_published_again(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    for number, run in enumerate(("aa", "bb"), start=1):
        run_at(runs / run, {"lora": {"rank": 16 * number}}, time_s=number)
    published = tmp_path / "lora" / "provenance.json"
    published.parent.mkdir()
    new, facts = RunLayout(runs / "new"), {"lora": {"rank": 8}}
    for text in ('{"run": "aa"}', "{", "[]", '{"run": "gone"}', '{"run": 3}'):
        published.write_text(text)
        before = "aa in lora.rank 16" if "aa" in text else "bb in lora.rank 32"
        assert difference_from_latest(new, facts, NO_SAMPLES) == f"it differs from {before} -> 8"


def test_a_first_run_has_no_difference(tmp_path: Path) -> None:
    assert difference_from_latest(RunLayout(tmp_path / "run"), {}, NO_SAMPLES) is None


@pytest.mark.parametrize("kind", ["folder", "damaged"])
def test_a_new_run_is_announced_even_if_the_earlier_record_cannot_be_read(tmp_path: Path, kind: str) -> None:
    record = tmp_path / "earlier" / "run.json"
    record.parent.mkdir()
    if kind == "folder":
        record.mkdir()
    else:
        record.write_text("{")
    difference = difference_from_latest(RunLayout(tmp_path / "later"), {}, NO_SAMPLES)
    assert str(difference).startswith("how it differs from earlier is unknown")


def rows(*samples: tuple[str, dict[str, str]], **every: str) -> pl.DataFrame:
    """Return a table of samples, each with values derived from its name and the given ones."""
    columns = ("content_hash", "caption_hashes", "text_keys", "bucket", "latent_keys", "split")
    return pl.DataFrame(
        [
            {"sample_id": name, **{column: f"{column} of {name}" for column in columns}, **every, **values}
            for name, values in samples
        ]
    )


BEFORE = rows(*((f"holiday/{name}.jpg", {}) for name in "abcde"))


def changed(*names: str, **values: str) -> pl.DataFrame:
    """Return `BEFORE` with other values of some samples."""
    is_named = pl.col("sample_id").is_in([f"holiday/{name}.jpg" for name in names])
    return BEFORE.with_columns(
        pl.when(is_named).then(pl.lit(value)).otherwise(pl.col(column)).alias(column)
        for column, value in values.items()
    )


def renamed(pattern: str, new: str) -> pl.DataFrame:
    return BEFORE.with_columns(pl.col("sample_id").str.replace(pattern, new))


CHANGES: dict[str, tuple[pl.DataFrame, str]] = {
    "caption": (changed("b", caption_hashes="x", text_keys="y"), "caption of holiday/b.jpg"),
    "captions": (
        changed(*"abde", caption_hashes="x", text_keys="y"),
        "4 captions: holiday/a.jpg, holiday/b.jpg, holiday/d.jpg and 1 more",
    ),
    "text encoder": (
        changed(*"abcde", text_keys="y"),
        "5 text embeddings: holiday/a.jpg, holiday/b.jpg, holiday/c.jpg and 2 more",
    ),
    "image": (changed("c", content_hash="x", latent_keys="y", bucket="z"), "file holiday/c.jpg"),
    "bucket": (
        changed("a", "b", bucket="64x64", latent_keys="y"),
        "2 images in other buckets: holiday/a.jpg, holiday/b.jpg",
    ),
    "latents": (changed("e", latent_keys="y"), "latent of holiday/e.jpg"),
    "holdout": (changed("e", split="validation"), "holdout membership of holiday/e.jpg"),
    "new image": (
        pl.concat([BEFORE, rows(("holiday/f.jpg", {}))]),
        "new image holiday/f.jpg",
    ),
    "removed image": (BEFORE.head(-1), "removed image holiday/e.jpg"),
    "renamed image": (renamed(r"d\.jpg", "luna.jpg"), "renamed image holiday/d.jpg -> holiday/luna.jpg"),
    "renamed dataset": (
        renamed("holiday", "urlaub"),
        "5 renamed images: holiday/a.jpg -> urlaub/a.jpg, holiday/b.jpg -> urlaub/b.jpg, "
        "holiday/c.jpg -> urlaub/c.jpg and 2 more",
    ),
    "references": (
        BEFORE.with_columns(reference_hashes=pl.lit("h"), reference_keys=pl.lit("k")),
        "5 references: holiday/a.jpg, holiday/b.jpg, holiday/c.jpg and 2 more",
    ),
}
"""Changes of samples with the difference that a run states."""


@pytest.mark.parametrize("name", CHANGES)
def test_R11_a_difference_names_the_samples_that_changed(tmp_path: Path, name: str) -> None:
    after, expected = CHANGES[name]
    run_at(
        tmp_path / "earlier",
        {"samples": dict.fromkeys(("latents", "text", "references", "repeats"), "1")},
        samples=BEFORE,
    )

    # An image has another latent, a caption another embedding; a changed set of images changes all hashes.
    facts: dict[str, str] = dict.fromkeys(("latents", "text", "references", "repeats"), "1")
    if name == "references":
        facts |= {"text": "2", "references": "2"}
    elif name in {"image", "new image", "removed image", "renamed image", "renamed dataset", "holdout"}:
        facts = dict.fromkeys(facts, "2")
    elif name in {"caption", "captions", "text encoder"}:
        facts["text"] = "2"
    else:
        facts["latents"] = "2"
    difference = difference_from_latest(RunLayout(tmp_path / "new"), {"samples": facts}, after)
    assert difference == f"it differs from earlier in {expected}"


def test_changes_of_several_kinds_and_settings_are_all_stated() -> None:
    after = pl.concat([changed("b", caption_hashes="x", text_keys="y").tail(-1), rows(("holiday/f.jpg", {}))])
    facts = (
        {"samples": {"text": number, "latents": number}, "lora": {"rank": 16 * number}} for number in (1, 2)
    )
    assert describe_difference(*facts, BEFORE, after) == [
        "new image holiday/f.jpg",
        "removed image holiday/a.jpg",
        "caption of holiday/b.jpg",
        "lora.rank 16 -> 32",
    ]


def test_a_change_that_no_sample_explains_is_named_without_hashes() -> None:
    before = {"plan": {"seed": 1, "batch_size": 2}, "samples": {"repeats": "a" * 64, "masks": "a" * 64}}
    after = {"plan": {"seed": 3, "batch_size": 2}, "samples": {"repeats": "b" * 64}}
    for tables in ((BEFORE, BEFORE), (None, None), (None, BEFORE)):
        assert describe_difference(before, after, *tables) == ["masks", "repeats", "plan.seed 1 -> 3"]


@pytest.mark.parametrize("kind", ["missing", "damaged", "old columns"])
def test_a_run_without_a_usable_table_of_samples_is_compared_by_its_facts(tmp_path: Path, kind: str) -> None:
    run_at(tmp_path / "earlier", {"samples": {"text": "1"}})
    table = tmp_path / "earlier" / "samples.parquet"
    if kind == "damaged":
        table.write_bytes(b"PAR1 and no more")
    elif kind == "old columns":
        BEFORE.drop("split").write_parquet(table)
    difference = difference_from_latest(RunLayout(tmp_path / "new"), {"samples": {"text": "2"}}, BEFORE)
    assert difference == "it differs from earlier in captions"
