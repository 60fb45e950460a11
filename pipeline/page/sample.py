"""The page of one image: its picture with crop, mask and references, its facts, and its captions to edit."""

from __future__ import annotations

import json
import shlex
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import polars as pl

from pipeline.errors import LatentlineError
from pipeline.images.mask import show_mask
from pipeline.log import discard
from pipeline.page.dataset import read_rejected, shortened
from pipeline.raw_images.sources import side_input_sources_of, sources_of
from pipeline.reporting.pictures import SheetImage, jpeg, readable_thumbnail
from pipeline.side_inputs import MASKS, REFERENCES
from pipeline.storage.tables import Tables
from pipeline.validated_dataset.captions import EDITED, Caption
from pipeline.validated_dataset.edited_captions import (
    EditedCaptions,
    current_captions,
    edit_captions,
    edited_file,
    restore_captions,
)

if TYPE_CHECKING:
    from pipeline.page.dataset import Dataset
    from pipeline.recipe import Recipe

EDGE_PX = 768
"""Longer edge of the picture."""

_MAX_BYTES = 300_000

MAX_COMMAND_CHARACTERS = 1_000
"""Maximum number of characters shown of a command with a long caption."""

IMAGE, MASK, REFERENCE = "image", "mask", "reference"
"""Kinds of pictures of an image; the kind of a reference is followed by its number, from 0."""


def read_sample(recipe: Recipe, sample_id: str) -> dict[str, Any] | None:
    """Return the row of a sample in validated_dataset, or else in the rejected ones; None without both."""
    tables = Tables(recipe.output_dir)
    is_sample = pl.col("sample_id") == sample_id
    for table in (tables.read_previous("validated_dataset"), read_rejected(tables)):
        if table is not None and len(rows := table.filter(is_sample)):
            return rows.row(0, named=True)
    return None


def sample_contents(recipe: Recipe, row: Mapping[str, Any], dataset: Dataset) -> dict[str, Any]:
    """Return the values of the page of a sample.

    Args:
        recipe: The recipe.
        row: Row of `read_sample`.
        dataset: All images, for bucket and crop, and for the links to the images before and after it.
    """
    sample_id = row["sample_id"]
    caption, error = None, None
    try:
        caption = current_captions(recipe, sample_id, row["path"])
    except (LatentlineError, OSError) as err:
        error = err
    kept = list(dataset.shown(dataset.kept.filter(pl.col("sample_id") == sample_id)))
    before, after = _neighbours(recipe, dataset.kept["sample_id"].to_list(), sample_id)
    return {
        "row": row,
        "is_rejected": "reason" in row,
        "texts": caption.texts if caption else ("",),
        "source": caption.source if caption else "",
        "is_edited": sample_id in EditedCaptions(recipe.output_dir).files,
        "is_pending": caption is not None and _is_pending(recipe, row, caption),
        "error": error,
        "bucket": kept[0]["bucket"] if kept else "",
        "crops": kept[0]["crops"] if kept else [],
        "parts": _parts(recipe, row),
        "before": before,
        "after": after,
    }


def _is_pending(recipe: Recipe, row: Mapping[str, Any], caption: Caption) -> bool:
    """Return whether the caption was edited or restored since the table was written."""
    if caption.source != EDITED:
        return row.get("caption_from") == EDITED
    table = Tables(recipe.output_dir).path("validated_dataset")
    edited = edited_file(recipe.output_dir, row["sample_id"])
    return (
        row.get("caption_from") != EDITED
        or not edited.is_file()
        or edited.stat().st_mtime_ns > table.stat().st_mtime_ns
    )


def with_pending_captions(recipe: Recipe, rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Return what the page shows of images, with captions that were edited or restored since the last job.

    `pending` states such a change; it is empty without one.
    """
    edited = EditedCaptions(recipe.output_dir)
    settings = {each.name: each.captions for each in recipe.datasets}
    for row in rows:
        sample_id, changes = row["sample_id"], {"pending": ""}
        caption = None
        # An unreadable file is explained on the page of its image, and the recipe may have lost the dataset.
        with suppress(LatentlineError, OSError, KeyError):
            caption = edited.read(settings[sample_id.partition("/")[0]], sample_id)
        if caption is None and row.get("caption_from") == EDITED:
            changes = {"pending": "Restored: the next job uses the caption of the dataset."}
        elif caption is not None and _is_pending(recipe, row, caption):
            changes = {
                "pending": "Edited: the next job uses this caption.",
                "captions": shortened(caption.texts),
            }
        yield {**row, **changes}


def _neighbours(recipe: Recipe, sample_ids: Sequence[str], sample_id: str) -> tuple[str, str]:
    """Return the addresses of the images before and after one; empty at the ends and for a rejected one."""
    index = bisect_left(sample_ids, sample_id)
    if index == len(sample_ids) or sample_ids[index] != sample_id:
        return "", ""
    before = address(recipe, sample_ids[index - 1]) if index else ""
    return before, address(recipe, sample_ids[index + 1]) if index + 1 < len(sample_ids) else ""


def address(recipe: Recipe, sample_id: str) -> str:
    """Return the address of the page of a sample."""
    return f"/{recipe.name}/sample?{urlencode({'id': sample_id})}"


def _parts(recipe: Recipe, row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the text and the address of each picture of a kept image, the image first."""
    if "reason" in row:
        return []

    def part(kind: str, text: str, content_hash: str) -> tuple[str, str]:
        query = {"id": row["sample_id"], "part": kind, "v": content_hash[:16]}
        return text, f"/{recipe.name}/picture?{urlencode(query)}"

    parts = [part(IMAGE, row["path"], row["content_hash"])]
    if row.get("mask_hash"):
        text = f"mask, mean weight {row['mask_mean']:.2f}; red does not count"
        parts.append(part(MASK, text, row["mask_hash"]))
    for number, reference in enumerate(json.loads(row.get("reference_images") or "[]")):
        text = f"reference {number}: {reference['path']}"
        parts.append(part(f"{REFERENCE}-{number}", text, reference["hash"]))
    return parts


def sample_picture(recipe: Recipe, sample_id: str, part: str) -> bytes | None:
    """Return a JPEG of a kept image, of its mask over it, or of one of its references; None without one."""
    row = read_sample(recipe, sample_id)
    if row is None or part not in _names_of(recipe, row):
        return None
    item = _sheet_image(recipe, row, part)
    picture = readable_thumbnail(item, edge_px=EDGE_PX) if item else None
    return jpeg(picture, _MAX_BYTES) if picture else None


def _names_of(recipe: Recipe, row: Mapping[str, Any]) -> list[str]:
    if "reason" in row or row["dataset"] not in sources_of(recipe):
        return []
    numbers = range(len(json.loads(row.get("reference_images") or "[]")))
    masks = [MASK] if row.get("mask_hash") else []
    return [IMAGE, *masks, *(f"{REFERENCE}-{number}" for number in numbers)]


def _sheet_image(recipe: Recipe, row: Mapping[str, Any], part: str) -> SheetImage | None:
    image = sources_of(recipe)[row["dataset"]].file(row["path"])
    if part == IMAGE:
        return SheetImage(image)
    kind = MASKS if part == MASK else REFERENCES
    sources = side_input_sources_of(recipe, kind.recipe_key).get(row["dataset"])
    if sources is None:  # the recipe has changed since
        return None
    if part != MASK:
        number = int(part.rpartition("-")[2])
        if number >= len(sources):
            return None
        return SheetImage(sources[number].file(json.loads(row["reference_images"])[number]["path"]))
    mask, source = sources[0].file(row["mask_path"]), MASKS.sources(recipe)[row["dataset"]]
    return SheetImage(image, change=lambda picture: show_mask(picture, mask=mask, source=source))


def edit(recipe: Recipe, sample_id: str, texts: Sequence[str]) -> str:
    """Write edited captions, or restore the dataset's without any; return the command that does the same."""
    command = ["latentline", "edit-caption", recipe.name]
    done = "saved" if texts else "restored"
    try:
        if texts:
            edit_captions(recipe, sample_id, texts, discard)
            needs_dashes = any(text.startswith("-") for text in (sample_id, *texts))
            command += [*(["--"] if needs_dashes else []), sample_id, *texts]
        else:
            restore_captions(recipe, sample_id, discard)
            command += ["--restore", sample_id]
    except LatentlineError as err:
        return err.text()
    except OSError as err:
        return f"the caption cannot be written: {err.strerror or err} ({err.filename})"
    text = shlex.join(command)
    shown = text if len(text) <= MAX_COMMAND_CHARACTERS else f"{text[:MAX_COMMAND_CHARACTERS]}..."
    return f"{done}: {shown}\nThe next job uses it, encodes no other caption, and trains a new run."
