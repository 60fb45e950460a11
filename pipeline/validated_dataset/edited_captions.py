"""Captions that a person has edited, in files below `output_dir`: each wins over the captions of the dataset.

captions/<sample id>.txt     UTF-8; an empty line separates the captions of an image that has several

The name keeps the suffix of the image, so that `photos/a.png` and `photos/a.jpg` have two files,
`photos/a.png.txt` and `photos/a.jpg.txt`. A canonical caption has no empty line, so a file holds any captions
exactly.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from pipeline.errors import DatasetError
from pipeline.escaping import printable
from pipeline.outputs.folder import outputs_of
from pipeline.raw_images.manifest import captions_by_path, composed, manifests_with_columns
from pipeline.raw_images.sources import sources_of
from pipeline.recipe.captions import CaptionSettings
from pipeline.storage.atomic import write_bytes
from pipeline.storage.source import MAX_TEXT_BYTES, LocalSource
from pipeline.storage.tables import Tables
from pipeline.validated_dataset.caption_files import read_caption_text
from pipeline.validated_dataset.captions import EDITED, Caption, caption_of, usable_texts

if TYPE_CHECKING:
    from pipeline.log import Log
    from pipeline.recipe import Recipe

FOLDER = "captions"
SUFFIX = ".txt"

_FIX = "write a caption, or delete the file, which restores the caption of the dataset"
_EMPTY_LINES = re.compile(r"\n\s*\n")


@dataclass(frozen=True)
class EditedCaptions:
    """The edited captions of a recipe."""

    output_dir: Path

    @cached_property
    def files(self) -> Mapping[str, str]:
        """Files by sample id, with their paths below the folder.

        Raises:
            OSError: A folder cannot be listed.
        """
        top = self.output_dir / FOLDER
        paths = (
            os.path.relpath(os.path.join(folder, name), top)  # noqa: PTH118 - a Path changes names such as `a/./b`
            for folder, _, names in os.walk(top, onerror=_raise_unless_missing)
            for name in names
            if not name.startswith(".")
        )
        # Some file systems list decomposed names.
        return {unicodedata.normalize("NFC", path.removesuffix(SUFFIX)): path for path in sorted(paths)}

    def read(self, settings: CaptionSettings, sample_id: str) -> Caption | None:
        """Return the edited captions of an image; None without such a file.

        `captions.lines` applies, and `captions.replace` does not: a person has written the final words.

        Raises:
            ImageError: The file cannot be read or decoded, or holds no readable text.
        """
        path = self.files.get(sample_id, "")
        if not path.endswith(SUFFIX):
            return None
        source = LocalSource(self.output_dir / FOLDER)
        # The encoding of the recipe is the one of the files in the dataset.
        text = read_caption_text(CaptionSettings(), source, path)
        return None if text is None else Caption(_texts_in(text, settings, source.where(path)), EDITED)

    def without_image(self, sample_ids: Collection[str]) -> list[str]:
        """Return the printable paths of the files that belong to none of these samples."""
        return [
            printable(f"{FOLDER}/{path}")
            for sample_id, path in self.files.items()
            if sample_id not in sample_ids or not path.endswith(SUFFIX)
        ]


def _raise_unless_missing(err: OSError) -> None:
    if not isinstance(err, FileNotFoundError):
        raise err


def _texts_in(text: str, settings: CaptionSettings, where: str) -> tuple[str, ...]:
    parts = _EMPTY_LINES.split("\n".join(text.splitlines()))
    return usable_texts(parts, settings.model_copy(update={"replace": ()}), where, fix=_FIX)


def edited_file(output_dir: Path, sample_id: str) -> Path:
    """Return the file of the edited captions of an image."""
    # Ids come from tables, but also from the command line and from forms.
    parts = sample_id.split("/")
    if len(parts) < 2 or "\0" in sample_id or any(part in ("", ".", "..") for part in parts):
        raise DatasetError(
            f"{sample_id!a} is not the id of a sample",
            where=str(output_dir / FOLDER),
            fix="use <dataset>/<path>, as in the tables",
        )
    return output_dir / FOLDER / f"{sample_id}{SUFFIX}"


def current_captions(recipe: Recipe, sample_id: str, path: str) -> Caption:
    """Return the captions of an image as a person edits them: without trigger word, prefix and variants.

    Raises:
        DatasetError: The recipe does not have the dataset any more, or its manifest cannot be used.
        ImageError: See `caption_of`.
    """
    dataset = sample_id.partition("/")[0]
    settings = next((each for each in recipe.datasets if each.name == dataset), None)
    if settings is None:
        names = ", ".join(each.name for each in recipe.datasets)
        what = f"the recipe has no dataset {dataset!a}, its datasets are {names}"
        raise DatasetError(what, where=f"{recipe.source}, datasets", fix="run the cache job again")
    edited = EditedCaptions(recipe.output_dir).read(settings.captions, sample_id)
    if edited is not None:
        return edited

    texts, written = None, None
    if settings.captions.from_ == "model":
        captions = Tables(recipe.output_dir).read_previous("captions")
        rows = {} if captions is None else dict(captions.select("sample_id", "caption").iter_rows())
        written = rows.get(sample_id)
    if settings.captions.from_ == "column":
        [(_, table)] = manifests_with_columns([settings], max_bytes=recipe.checks.max_file_bytes)
        texts = captions_by_path(settings, table).get(composed(path))
    return caption_of(settings.captions, sources_of(recipe)[dataset], path, texts, written=written)


def edit_captions(recipe: Recipe, sample_id: str, texts: Sequence[str], log: Log) -> Path:
    """Write the captions of an image to its file, which the next job reads, and return the file.

    Raises:
        ImageError: No text is readable, or one is invalid Unicode.
        DatasetError: They are too long, or `sample_id` is not the id of a sample.
        StoreError: The outputs are at an address that does not answer.
        OSError: The file cannot be written.
    """
    file = edited_file(recipe.output_dir, sample_id)
    usable = usable_texts(texts, CaptionSettings(), str(file), fix=_FIX)
    data = ("\n\n".join(usable) + "\n").encode("utf-8")
    if len(data) > MAX_TEXT_BYTES:
        what = f"the caption must have at most {MAX_TEXT_BYTES:,} bytes, got {len(data):,}"
        raise DatasetError(what, where=str(file), fix="write a shorter caption")
    write_bytes(file, data)
    outputs_of(recipe, log).upload(file.relative_to(recipe.output_dir).as_posix())
    return file


def restore_captions(recipe: Recipe, sample_id: str, log: Log) -> bool:
    """Delete the edited captions of an image, and return whether there were any.

    Raises:
        DatasetError: `sample_id` is not the id of a sample.
        StoreError: The outputs are at an address that does not answer.
        OSError: The file cannot be deleted.
    """
    file = edited_file(recipe.output_dir, sample_id)
    exists = file.is_file()
    file.unlink(missing_ok=True)
    name = PurePosixPath(FOLDER, f"{sample_id}{SUFFIX}")
    outputs_of(recipe, log).remove(str(name))
    for folder in list(name.parents)[:-1]:
        with suppress(OSError):  # another edited caption is in it
            (recipe.output_dir / folder).rmdir()
    return exists
