"""Stage captions: a vision-language model captions the images that have no caption.

A caption is an entry of the cache, and the table has its text. The dataset is never changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.cache.recipe_entries import RecipeEntries, is_unchanged
from pipeline.captions.checks import judged
from pipeline.captions.entries import FAILED, caption_requests, read_caption, same_request, with_keys
from pipeline.captions.model import model_record, resolve_model
from pipeline.captions.report import SAMPLES, write_sheet
from pipeline.encoding.fill import EntryRequests, FillResult, fill
from pipeline.encoding.jobs import Failure
from pipeline.errors import counted
from pipeline.log import Log
from pipeline.processes.launch import Launch
from pipeline.raw_images.commits import at_scanned_commits
from pipeline.raw_images.manifest import manifests_with_columns
from pipeline.raw_images.parallel import in_threads
from pipeline.raw_images.sources import sources_of
from pipeline.reporting.reports import Report, StageResult, Stopwatch
from pipeline.storage.needed_columns import NEEDED
from pipeline.storage.source import threads_for
from pipeline.storage.tables import SCHEMAS, empty, row_names, validated
from pipeline.validated_dataset.captions import canonical, is_left_to_model
from pipeline.validated_dataset.edited_captions import EditedCaptions
from pipeline.validated_dataset.filters import select

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.recipe import CaptionSettings, Recipe
    from pipeline.storage.tables import Tables

ASSET = "captions"


def caption_images(
    recipe: Recipe, raw: pl.DataFrame, tables: Tables, *, launch: Launch, log: Log, sample: int | None = None
) -> StageResult:
    """Caption the images of raw_images that need it, and are not captioned yet.

    Nothing is launched if nothing is missing. With `sample`, at most so many images are captioned, the same
    ones in each run.

    Raises:
        DatasetError: A manifest cannot be used.
        ModelError: The model is missing, or cannot be loaded.
        StoreError: The cache cannot be read or written.
    """
    watch = Stopwatch()
    recipe = at_scanned_commits(recipe)
    entries = RecipeEntries(recipe, log=log)
    images = images_to_caption(recipe, raw, log=log)
    if sample is not None:
        # By content, so that names and new images change the choice as little as possible.
        images = images.sort("content_hash", "sample_id").head(sample).sort("sample_id")

    previous = tables.read_previous(ASSET)
    parts, requested = [empty(ASSET)], [pl.DataFrame(schema={"sample_id": pl.String, "key": pl.String})]
    filled: list[FillResult] = []
    models: list[Report] = []
    for settings, of_model in by_request(recipe, images):
        model = resolve_model(entries, settings)
        models.append(model_record(model, settings, of_model["dataset"].unique().to_list()))
        requests = caption_requests(entries, model, settings, of_model, previous)
        result = fill(entries, requests, launch=launch, log=log, watch=watch)
        filled.append(result)
        rows = with_keys(entries, model, settings, of_model)
        requested.append(rows.select("sample_id", "key"))
        # Samples with equal images share an entry.
        rows = rows.join(result.entries, on="key").with_columns(pl.col("cut") == 1)
        rows = rows.join(_texts(entries, requests, result, previous), on="key")
        parts.append(rows.select(pl.col(name).cast(kind) for name, kind in SCHEMAS[ASSET].items()))
    table = validated(ASSET, pl.concat(parts), "result of captions").sort(row_names(ASSET))
    write_sheet(recipe, table, folder=ASSET if sample is None else SAMPLES, log=log)
    report = _report(raw, pl.concat(requested), table, filled)
    return StageResult(table, empty("rejected"), {**report, "models": models, **watch.numbers()})


def images_to_caption(recipe: Recipe, raw: pl.DataFrame, *, log: Log) -> pl.DataFrame:
    """Return the rows of raw_images that the model captions, with the `root` of their dataset, sorted.

    They pass the filters of the recipe, and no person has edited their captions. With `when: missing`, they
    have no caption file with a text.
    """
    with_columns = manifests_with_columns(recipe.datasets, max_bytes=recipe.checks.max_file_bytes)
    manifests = {settings.name: table for settings, table in with_columns}
    columns = NEEDED["captions"]["raw_images"]
    chosen, _ = select(recipe, raw.select(columns), manifests, stage=ASSET)
    by_model = {each.name: each for each in recipe.datasets if each.captions.from_ == "model"}
    edited = list(EditedCaptions(recipe.output_dir).files)
    chosen = chosen.filter(
        pl.col("dataset").is_in(list(by_model)) & ~pl.col("sample_id").is_in(edited),
    )

    sources = {name: source for name, source in sources_of(recipe).items() if name in by_model}

    def is_needed(row: dict[str, Any]) -> bool:
        return is_left_to_model(by_model[row["dataset"]].captions, sources[row["dataset"]], row["path"])

    threads = threads_for(sources.values()) or 1
    needed = in_threads(is_needed, chosen.to_dicts(), log=log, doing="caption files found", threads=threads)
    chosen = chosen.filter(pl.Series(list(needed), dtype=pl.Boolean))
    roots = {name: str(each.root) for name, each in by_model.items()}
    return chosen.with_columns(root=pl.col("dataset").replace_strict(roots, return_dtype=pl.String))


def by_request(recipe: Recipe, images: pl.DataFrame) -> Iterator[tuple[CaptionSettings, pl.DataFrame]]:
    """Yield the images of each model and prompt; datasets that have both in common share one launch."""
    names: dict[CaptionSettings, list[str]] = {}
    for dataset in recipe.datasets:
        if dataset.captions.from_ == "model":
            names.setdefault(same_request(dataset.captions), []).append(dataset.name)
    for settings, datasets in names.items():
        of_model = images.filter(pl.col("dataset").is_in(datasets))
        # Without an image, the model is not needed, nor downloaded.
        if not of_model.is_empty():
            yield settings, of_model


def _texts(
    entries: RecipeEntries, requests: EntryRequests, result: FillResult, previous: pl.DataFrame | None
) -> pl.DataFrame:
    """Return key and canonical caption of each valid entry; texts of unchanged entries are not read again."""
    known: dict[str, str] = {}
    if previous is not None:
        rows = requests.rows.filter(is_unchanged(entries.store, "captions", requests.rows))
        keys = set(rows["key"]) - result.encoded
        known = {key: text for key, text in previous.select("key", "caption").iter_rows() if key in keys}
    read = {
        key: canonical(read_caption(entries.store, key)) for key in result.entries["key"] if key not in known
    }
    texts = list((known | read).items())
    return pl.DataFrame(texts, schema={"key": pl.String, "caption": pl.String}, orient="row")


def _report(
    raw: pl.DataFrame, requested: pl.DataFrame, table: pl.DataFrame, filled: list[FillResult]
) -> Report:
    counters: dict[str, int] = {}
    failures: dict[str, Failure] = {}
    for each in filled:
        failures |= each.failed
        counters = {
            name: counters.get(name, 0) + number
            for name, number in each.counters(0).items()
            if name in ("encoded", "reused", "damaged", "bytes")
        }
    # validated_dataset rejects an image that does not decode, with its own reason.
    refused = [
        (sample_id, failures[key].detail)
        for sample_id, key in requested.select("sample_id", "key").iter_rows()
        if key in failures and failures[key].reason == FAILED
    ]
    verdicts = judged(table, refused)
    return {
        "samples": len(table),
        "in": len(raw),
        "to_caption": len(requested),
        "failed": len(requested) - len(table),
        **{name: counters.get(name, 0) for name in ("encoded", "reused", "damaged", "bytes")},
        "tokens": int(table["num_tokens"].sum()),
        **verdicts,
        "why": f"{counted(len(table), 'caption')} of the model, {counters.get('encoded', 0):,} of them new, "
        f"{verdicts['cut']:,} cut off",
    }
