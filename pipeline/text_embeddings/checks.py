"""Checks of text_embeddings: every caption has an entry, of the encoders' shapes, exact size and finite.

To add a check, such as a gate on token counts: write a function here that returns an `Outcome`, and add it
to `outcomes` in `run` and the columns that it reads to `_COLUMNS`. Declare the check under the same name in
`pipeline/recipe/check_specs.py`, then generate the pages that list all checks (CONTRIBUTING.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.cache.entry_format import TEXT
from pipeline.cache.recipe_entries import SEEN, STAT_COLUMNS, RecipeEntries, with_recorded
from pipeline.encoding.checks import AT_ONCE, Problems
from pipeline.errors import counted, verb
from pipeline.reporting.findings import MAX_ROWS, CheckContext, Finding, Outcome, findings
from pipeline.side_inputs.references import IMAGES
from pipeline.text_embeddings.caption_rows import CAPTION_COLUMNS, EMPTY_CAPTION, text_rows, with_seen_images
from pipeline.text_embeddings.stage import needed_texts

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

STAGE = "text_embeddings"

_COLUMNS = (
    *("sample_id", "dataset", "variant", "caption", "num_tokens", "num_cut", "text_length", "key"),
    *STAT_COLUMNS,
    IMAGES,
)
"""Columns of text_embeddings that the checks use."""


def run(context: CheckContext) -> list[Finding]:
    """Return the findings of all checks, from the tables, the store and the base model's files."""
    entries = RecipeEntries(context.recipe, log=context.log)
    table = with_seen_images(entries, context.tables.read(STAGE, _COLUMNS))
    sizes = _sizes(entries, table)
    problems = Problems(
        entries.store,
        "text",
        _entry_rows(entries, table, sizes),
        lambda row: entries.text_spec(row["caption"], row["text_length"], row.get(SEEN)),
        log=entries.log,
    )
    captions = text_rows(entries, context.tables.read("validated_dataset", CAPTION_COLUMNS))
    rejected = context.tables.read_rejected(STAGE)
    captions = captions.join(rejected, on="sample_id", how="anti", maintain_order="left")

    # The empty caption with a sample's references has a row too, but it is not a caption of the dataset.
    num_captions = int((captions["variant"] > EMPTY_CAPTION).sum())

    count = counted(problems.num_entries, "entry", "entries")
    outcomes = {
        "completeness": problems.outcome(
            "completeness",
            f"each of {counted(num_captions, 'caption')} and the empty one has its entry",
            more=list(_table_differences(entries, table, sizes, captions)),
        ),
        "shape_uniformity": problems.outcome(
            "shape_uniformity",
            f"{count} with the shapes that the encoders' configurations define",
            more=list(_wrong_lengths(entries, table)),
        ),
        "file_size_outliers": problems.outcome("file_size_outliers", f"{count} of exactly the expected size"),
        "finite_values": problems.outcome("finite_values", f"{count} with valid content"),
        **caption_warnings(entries, table),
    }
    return findings(context, STAGE, outcomes)


def caption_warnings(entries: RecipeEntries, table: pl.DataFrame) -> dict[str, Outcome]:
    """Return the outcome of each check that is a warning.

    `table` needs sample_id, dataset, caption, num_tokens and num_cut, which are null for captions that are
    not encoded yet, and `SEEN` if the text encoder sees references.
    """
    return {
        "captions_fit": _captions_fit(entries, table),
        "trigger_fits": _trigger_fits(entries, table),
        "previews_name_trigger": _previews_name_trigger(entries.recipe),
    }


def _sizes(entries: RecipeEntries, table: pl.DataFrame) -> pl.DataFrame:
    """Return `text_length`, `num_bytes` and `about_bytes` per row; null if the key is not its caption's."""
    names = ["key", *_text_columns(entries)]
    parts: list[pl.DataFrame] = []

    # In slices, so that keys and stats of millions of rows are never in memory together.
    for rows in table.iter_slices(AT_ONCE):
        requests = _requests(entries, rows, rows)
        sizes = rows.select(names).join(
            requests, on=names, how="left", nulls_equal=True, maintain_order="left"
        )
        parts.append(sizes)
    return pl.concat(parts or [entries.text_requests([])]).select("text_length", "num_bytes", "about_bytes")


def _text_columns(entries: RecipeEntries) -> tuple[str, ...]:
    return ("caption",) if entries.text_images is None else ("caption", SEEN)


def _requests(
    entries: RecipeEntries, rows: pl.DataFrame, previous: pl.DataFrame | None = None
) -> pl.DataFrame:
    texts = rows.select(_text_columns(entries)).unique()
    images = texts.get_column(SEEN, default=None)
    return entries.text_requests(texts["caption"], previous, images=images)


def _entry_rows(entries: RecipeEntries, table: pl.DataFrame, sizes: pl.DataFrame) -> pl.DataFrame:
    columns = ("sample_id", *_text_columns(entries), "key", "text_length", "num_bytes", *STAT_COLUMNS)

    # Rows with another key are reported by completeness; their entries belong to another caption.
    own = table.drop("text_length").hstack(sizes).filter(pl.col("about_bytes").is_not_null())
    own = own.unique("key", keep="first", maintain_order=True).select(columns)

    # Preview prompts and the empty caption have entries without a row in the table.
    extra = _requests(entries, needed_texts(entries, table.clear()))
    names = [f"the preview prompt {text!r}" if text else "the empty caption" for text in extra["caption"]]
    extra = extra.with_columns(pl.Series("sample_id", names, dtype=pl.String))
    extra = with_recorded(extra, None).select(columns).cast(own.schema)
    return pl.concat([own, extra.join(own, on="key", how="anti")])


def _wrong_lengths(entries: RecipeEntries, table: pl.DataFrame) -> Iterator[dict[str, Any]]:
    tensor = entries.text_spec("").tensors[TEXT]
    max_length = tensor.shape[0]

    # A family that stores captions without padding has a length per caption.
    if tensor.ragged:
        is_wrong, limit = ~pl.col("text_length").is_between(1, max_length), f"at most {max_length}"
    else:
        is_wrong, limit = pl.col("text_length") != max_length, f"{max_length}"

    for sample_id, length in table.filter(is_wrong).select("sample_id", "text_length").iter_rows():
        problem = f"its text embedding must have {limit} tokens, got {length}"
        yield {"sample_id": sample_id, "problem": problem}


def _table_differences(
    entries: RecipeEntries, table: pl.DataFrame, sizes: pl.DataFrame, captions: pl.DataFrame
) -> Iterator[dict[str, Any]]:
    names = ["sample_id", "variant"]
    texts = _text_columns(entries)

    # The usual case ends here, before any join.
    same_captions = table.select(*names, *texts).equals(captions.select(*names, *texts))
    if same_captions and not sizes["about_bytes"].null_count():
        return

    keys = entries.text_keys(captions["caption"], captions.get_column(SEEN, default=None))
    expected = captions.select(*names, keys.alias("expected_key"))
    both = table.select(*names, "key").join(expected, on=names, how="full", coalesce=True)
    different = both.filter(~pl.col("key").eq_missing(pl.col("expected_key"))).sort(names)
    for sample_id, variant, key, expected_key in different.select(*names, "key", "expected_key").iter_rows():
        subject = f"variant {variant} of its caption" if variant else "it"
        subject = "its empty caption" if variant == EMPTY_CAPTION else subject
        if key is None:
            problem = f"{subject} is in validated_dataset but not in text_embeddings"
        elif expected_key is None:
            problem = f"{subject} is not in validated_dataset"
        else:
            problem = "its entry belongs to another caption, model or setting"
        yield {"sample_id": sample_id, "problem": problem}


def _captions_fit(entries: RecipeEntries, table: pl.DataFrame) -> Outcome:
    cut = table.filter(pl.col("num_cut") > 0).sort("num_cut", "sample_id", descending=[True, False])
    max_length = entries.family.max_length()
    numbers = {"samples": len(table), "cut": len(cut), "max_length": max_length}
    if cut.is_empty():
        return Outcome(True, f"all captions fit into {max_length} tokens", numbers=numbers)

    rows: list[dict[str, Any]] = [
        {
            "sample_id": row["sample_id"],
            "num_tokens": row["num_tokens"],
            "num_cut": row["num_cut"],
            # Only for rows that are shown, because each reads an entry.
            "cut_part": _cut_part(entries, row) if index < MAX_ROWS else "",
        }
        for index, row in enumerate(cut.iter_rows(named=True))
    ]
    num_captions = f"{len(cut):,} of {counted(len(table), 'caption')}"
    longest = f"{rows[0]['sample_id']} loses {counted(rows[0]['num_cut'], 'token')}"
    return Outcome(
        False,
        f"{num_captions} {verb(len(cut), 'is', 'are')} cut after {max_length} tokens; {longest}",
        "shorten these captions, or put what matters first",
        rows,
        numbers,
    )


def _trigger_fits(entries: RecipeEntries, table: pl.DataFrame) -> Outcome:
    """Report captions whose trigger word, class words or postfix the text encoder cuts off."""
    captions = {each.name: each.captions for each in entries.recipe.datasets}
    words = {
        name: {
            "captions.class_words" if each.class_words else "captions.trigger": each.class_words
            or each.trigger,
            "captions.postfix": each.postfix.strip(),
        }
        for name, each in captions.items()
    }
    rows: list[dict[str, Any]] = []
    for row in table.filter(pl.col("num_cut") > 0).iter_rows(named=True):
        # A text at the start is never cut off. Only other captions need their entry to be read.
        wanted = {key: text for key, text in words.get(row["dataset"], {}).items() if text}
        wanted = {key: text for key, text in wanted.items() if row["caption"].find(text) > 0}
        seen = row["caption"].removesuffix(_cut_part(entries, row)) if wanted else ""
        rows += [
            {"sample_id": row["sample_id"], "setting": key, "text": text}
            for key, text in wanted.items()
            if text not in seen
        ]
    if not rows:
        return Outcome(
            True, "the trigger word and the postfix are in the part of each caption that is encoded"
        )
    first, lose = rows[0], verb(len(rows), "loses", "lose")
    return Outcome(
        False,
        f"{counted(len(rows), 'caption')} {lose} a text of the recipe after {entries.family.max_length()} "
        f"tokens; {first['sample_id']} loses {first['setting']} {first['text']!r}",
        "shorten these captions, move the trigger word to the front, or use captions.prefix instead of "
        "captions.postfix",
        rows,
        {"cut_off": len(rows)},
    )


def _cut_part(entries: RecipeEntries, row: dict[str, Any]) -> str:
    caption = row["caption"]
    metadata = entries.store.check(entries.text_spec(caption, images=row.get(SEEN))).metadata
    cut_from = (metadata or {}).get("cut_from")
    # Whoever may write a shared cache may have written any metadata.
    return caption[cut_from:] if isinstance(cut_from, int) else ""


def _previews_name_trigger(recipe: Recipe) -> Outcome:
    # Without prompts, the first captions are drawn, which have the trigger word.
    prompts = recipe.preview_prompts if recipe.training.sample_every > 0 else ()
    missing = [
        captions.trigger
        for captions in recipe.trained_triggers
        if prompts and not any(captions.names_trigger(each.prompt) for each in prompts)
    ]
    rows: list[dict[str, Any]] = [{"trigger": trigger} for trigger in dict.fromkeys(missing)]
    if not rows:
        return Outcome(True, "the preview prompts contain each trigger word")
    words = ", ".join(str(row["trigger"]) for row in rows)
    num_prompts = counted(len(prompts), "preview prompt")
    return Outcome(
        False,
        f"none of {num_prompts} contains the trigger word {words}",
        "add the trigger word, or the text of captions.placeholder, to a prompt in training.sample_prompts",
        rows,
    )
