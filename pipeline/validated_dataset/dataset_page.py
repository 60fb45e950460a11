"""The dataset page: every image with its caption, bucket and repeats, and every rejected one with its fix.

    reports/dataset/index.html            the first `IMAGES_PER_PAGE` kept images
    reports/dataset/page-<number>.html    the following ones
    reports/dataset/rejected.html         rejected images, grouped by reason
    reports/dataset/thumbnails/           one JPEG per image, named after the image's content

The pages are static and need no JavaScript and no network. validated_dataset writes them, and aspect_buckets
adds the buckets. They are written again only if their contents have changed; a thumbnail is drawn once.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.errors import counted
from pipeline.escaping import html_text, printable
from pipeline.log import Log
from pipeline.raw_images.sources import sources_of
from pipeline.reporting.pictures import SheetImage, for_each_image, jpeg, readable_thumbnail
from pipeline.reporting.reports import StageResult, forget_current, is_current, mark_current
from pipeline.storage.addresses import Url
from pipeline.storage.atomic import write_bytes, write_text
from pipeline.storage.source import Source
from pipeline.storage.tables import content_digest
from pipeline.validated_dataset.holdout import times_drawn
from pipeline.validated_dataset.report import UNSAFE_REASONS

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

FOLDER = "dataset"
INDEX_FILE, REJECTED_FILE = "index.html", "rejected.html"
THUMBNAILS = "thumbnails"
_FORMAT = "1"

MAX_IMAGES = 2_000
"""Maximum number of kept images on the pages; a larger dataset shows this many, chosen by content."""

# Each thumbnail downloads its image.
MAX_REMOTE_IMAGES = 100
"""Maximum number of kept images of a recipe with a remote dataset."""

IMAGES_PER_PAGE = 100

MAX_PER_REASON = 100
"""Maximum number of rejected images shown per reason."""

MAX_CAPTION_CHARACTERS = 2_000
"""Maximum number of characters shown of the captions of one image."""

THUMBNAIL_PX = 192
_MAX_THUMBNAIL_BYTES = 20_000

KEPT_COLUMNS = (
    *("sample_id", "dataset", "path", "content_hash", "height", "width", "duplicate_group"),
    *("caption", "more_captions"),
)
_REJECTED_COLUMNS = ("sample_id", "dataset", "path", "stage", "reason", "detail", "fix", "content_hash")


def write_dataset_page(
    recipe: Recipe,
    table: pl.DataFrame,
    rejected: pl.DataFrame,
    *,
    placed: StageResult | None = None,
    log: Log,
) -> Path:
    """Write the pages unless they are up to date, and return the path of the first one.

    Without `placed`, pages that already show the same samples keep the buckets that they have.

    Args:
        recipe: Recipe of the tables.
        table: Table validated_dataset.
        rejected: Samples rejected by the scan and the validation.
        placed: Result of aspect_buckets, which adds buckets and further rejected samples.
        log: Receives the progress of drawing thumbnails.
    """
    folder = recipe.output_dir / "reports" / FOLDER
    shown, rejected_shown = _chosen(recipe, table), first_of_each_reason(rejected)
    counts = f"{_FORMAT} {recipe.name} {len(table)}"

    # The first digest covers what this stage knows, the second one what aspect_buckets adds. A run of
    # validated_dataset alone then keeps pages with buckets.
    digests = [content_digest(shown, rejected_shown, more=counts)]
    num_kept = len(table)
    if placed is not None:
        num_kept -= placed.rejected["sample_id"].n_unique()
        rejected_shown = first_of_each_reason(pl.concat([rejected, placed.rejected]))
        # An inner join, because samples that aspect_buckets rejected are not kept any more.
        shown = shown.join(bucket_texts(placed.table), on="sample_id", how="inner").sort("sample_id")
        digests.append(content_digest(shown, rejected_shown, more=str(num_kept)))

    if is_current(folder, *digests):
        return folder / INDEX_FILE

    # An interruption leaves no digest, so that the next run writes all pages again.
    forget_current(folder)
    sources = sources_of(recipe)
    thumbnails = _write_thumbnails(folder / THUMBNAILS, [shown, rejected_shown], sources, log)
    pages = _kept_pages(
        recipe.name, shown, thumbnails, num_kept=num_kept, num_rejected=_total(rejected_shown)
    )
    pages[REJECTED_FILE] = _rejected_page(recipe.name, rejected_shown, thumbnails)
    _replace_pages(folder, pages)
    mark_current(folder, *digests)
    return folder / INDEX_FILE


def _replace_pages(folder: Path, pages: Mapping[str, str]) -> None:
    """Write each page atomically, and delete old pages."""
    # The first page comes last, because it links to all pages.
    for name in reversed(list(pages)):
        write_text(folder / name, pages[name])
    for path in folder.glob("*.html"):
        if path.name not in pages:
            path.unlink()


def _chosen(recipe: Recipe, table: pl.DataFrame) -> pl.DataFrame:
    """Return at most `MAX_IMAGES` samples with `uses`, the number of times that an epoch shows each."""
    is_remote = any(isinstance(settings.root, Url) for settings in recipe.datasets)
    number = MAX_REMOTE_IMAGES if is_remote else MAX_IMAGES

    # Chosen by content, so that adding images to a large dataset replaces only some of them.
    columns = [name for name in (*KEPT_COLUMNS, "decoding") if name in table.columns]
    chosen = table.select(columns).bottom_k(number, by=["content_hash", "sample_id"])
    uses = times_drawn(chosen, recipe.datasets)
    return chosen.with_columns(uses=uses).drop("duplicate_group").sort("sample_id")


def bucket_texts(placed: pl.DataFrame) -> pl.DataFrame:
    """Return the buckets of each sample as one text."""
    return placed.group_by("sample_id").agg(bucket=pl.col("bucket").sort().str.join(", "))


def first_of_each_reason(rejected: pl.DataFrame) -> pl.DataFrame:
    """Return the first samples of each reason, the most frequent reason first, with `total` per reason."""
    counted_rows = rejected.select(*_REJECTED_COLUMNS).with_columns(total=pl.len().over("reason"))
    ordered = counted_rows.sort("total", "reason", "sample_id", descending=[True, False, False])
    return ordered.group_by("reason", maintain_order=True).head(MAX_PER_REASON)


def _total(rejected_shown: pl.DataFrame) -> int:
    return int(rejected_shown.unique("reason")["total"].sum())


def _write_thumbnails(
    folder: Path, tables: Sequence[pl.DataFrame], sources: Mapping[str, Source], log: Log
) -> set[str]:
    """Draw the missing thumbnails, delete thumbnails of other images, and return the names of all."""
    folder.mkdir(parents=True, exist_ok=True)
    images: dict[str, SheetImage] = {}
    for table in tables:
        for row in table.iter_rows(named=True):
            # Files that the scan did not read stay closed: they may be pipes, or links that lead out.
            if row["content_hash"] and row.get("reason") not in UNSAFE_REASONS and row["dataset"] in sources:
                file = sources[row["dataset"]].file(row["path"])
                images.setdefault(thumbnail_name(row), SheetImage(file))

    # A thumbnail is named after its content, so an existing one is always current.
    existing = {path.name for path in folder.iterdir()}
    for name in existing - set(images):
        (folder / name).unlink(missing_ok=True)

    def draw(name: str) -> None:
        picture = readable_thumbnail(images[name], edge_px=THUMBNAIL_PX)
        if picture is not None:
            write_bytes(folder / name, jpeg(picture, _MAX_THUMBNAIL_BYTES))

    for_each_image([name for name in images if name not in existing], draw, log=log)
    return {path.name for path in folder.iterdir()}


def thumbnail_name(row: Mapping[str, Any]) -> str:
    """Return the file name of the thumbnail of a row with a content hash."""
    # Decoding rules change the picture of an unchanged file.
    rules = f"-{row['decoding'].replace(' ', '-')}" if row.get("decoding") else ""
    return f"{row['content_hash'][:32]}{rules}.jpg"


def _kept_pages(
    name: str, shown: pl.DataFrame, thumbnails: set[str], *, num_kept: int, num_rejected: int
) -> dict[str, str]:
    """Return the pages of kept images by file name, the first page first."""
    slices = list(shown.iter_slices(IMAGES_PER_PAGE)) or [shown]
    names = [INDEX_FILE, *(f"page-{number}.html" for number in range(2, len(slices) + 1))]
    summary = f"{counted(num_kept, 'image')} kept"
    if len(shown) < num_kept:
        summary += f"; these pages show {len(shown):,} of them, tables/validated_dataset.parquet lists all"
    rejected_link = f'<a href="{REJECTED_FILE}">{num_rejected:,} rejected</a>'

    pages: dict[str, str] = {}
    header = f"<p>{html_text(summary)}; {rejected_link}</p>"
    for file, rows in zip(names, slices, strict=True):
        links = [
            f"<b>{number}</b>" if other == file else f'<a href="{other}">{number}</a>'
            for number, other in enumerate(names, start=1)
        ]
        navigation = f"<nav>{' '.join(links)}</nav>" if len(names) > 1 else ""
        figures = "\n".join(_figure(row, thumbnails) for row in rows.iter_rows(named=True))
        body = [header, navigation, "<main>", figures, "</main>", navigation]
        pages[file] = _html_page(f"{name}: dataset", "\n".join(body))
    return pages


def _figure(row: Mapping[str, Any], thumbnails: set[str]) -> str:
    facts = [f"{row['height']} x {row['width']} px (height x width)"]
    if row.get("bucket"):
        facts.append(f"bucket {row['bucket']}")
    facts.append(f"repeats {row['uses']}" if row["uses"] else "held out for validation")
    captions = " | ".join([row["caption"], *json.loads(row["more_captions"] or "[]")])
    if len(captions) > MAX_CAPTION_CHARACTERS:
        captions = f"{captions[:MAX_CAPTION_CHARACTERS]}… ({len(captions):,} characters)"
    lines = [
        f"<b>{html_text(printable(row['sample_id']))}</b>",
        f"<small>{html_text('; '.join(facts))}</small>",
        f'<span dir="auto">{html_text(printable(captions))}</span>',
    ]
    return f"<figure>{_picture(row, thumbnails)}<figcaption>{''.join(lines)}</figcaption></figure>"


def _picture(row: Mapping[str, Any], thumbnails: set[str]) -> str:
    """Return the thumbnail, or an empty frame for an image that cannot or must not be opened."""
    thumbnail = thumbnail_name(row) if row["content_hash"] else ""
    if thumbnail not in thumbnails:
        return '<div class="frame">not readable</div>'
    name = html_text(printable(posixpath.basename(row["path"])))
    return f'<img src="{THUMBNAILS}/{thumbnail}" alt="{name}" loading="lazy">'


def _rejected_page(name: str, rejected: pl.DataFrame, thumbnails: set[str]) -> str:
    sections = "\n".join(_rejected_sections(rejected, thumbnails))
    summary = f"{counted(_total(rejected), 'image')} rejected"
    body = f'<p><a href="{INDEX_FILE}">kept images</a>; {summary}; tables/rejected.parquet lists all</p>\n'
    return _html_page(f"{name}: rejected images", body + sections)


def _rejected_sections(rejected: pl.DataFrame, thumbnails: set[str]) -> Iterator[str]:
    for rows in rejected.partition_by("reason", maintain_order=True):
        reason, total = rows.select("reason", "total").row(0)
        note = f"; the first {len(rows):,} are shown" if len(rows) < total else ""
        yield f"<h2>{html_text(reason)}</h2>\n<p>{counted(total, 'image')}{note}</p>\n<main>"
        for row in rows.iter_rows(named=True):
            texts = {"b": row["sample_id"], "small": row["stage"], "span": row["detail"], "em": row["fix"]}
            labelled = {**texts, "em": f"fix: {texts['em']}"}
            lines = "".join(f"<{tag}>{html_text(printable(text))}</{tag}>" for tag, text in labelled.items())
            yield f"<figure>{_picture(row, thumbnails)}<figcaption>{lines}</figcaption></figure>"
        yield "</main>"


_STYLE = """
body { font: 15px/1.4 system-ui, sans-serif; margin: 1.5rem; color: #222; background: #fff; }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(210px, 1fr)); gap: 1rem; }
figure { margin: 0; padding: .5rem; border: 1px solid #ddd; border-radius: 4px; overflow-wrap: anywhere; }
figure img, .frame { display: block; max-width: 100%; margin: 0 auto .5rem; }
.frame { height: 6rem; line-height: 6rem; text-align: center; background: #ddd; color: #555; }
figcaption > * { display: block; font-size: 13px; }
small { color: #666; } em { margin-top: .3rem; } nav a, nav b { margin-right: .3rem; }
"""


def _html_page(title: str, body: str) -> str:
    """Return a complete page.

    Args:
        title: Plain text of the title and heading.
        body: HTML below the heading, with all texts escaped by `html_text`.
    """
    heading = html_text(title)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{heading}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{heading}</h1>\n{body}\n</body>\n</html>\n"
    )
