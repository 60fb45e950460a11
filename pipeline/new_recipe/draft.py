"""Drafts of datasets: what `latentline new` found in a folder or in another trainer's configuration."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import DatasetError, counted, verb
from pipeline.new_recipe.image_folders import MAX_PROMPT, ImageFolder, find_repeats_folders, scan_folder
from pipeline.new_recipe.one_file_captions import CaptionTable, find_caption_tables, read_caption_table
from pipeline.raw_images.folder import is_hidden
from pipeline.recipe import CaptionSettings
from pipeline.recipe.packed import PARQUET, TAR, WILDCARD
from pipeline.validated_dataset.variants import variants

DEFAULT_CAPTION = "a photograph"
"""Caption of images without any other text."""

_LETTERS = str.maketrans(
    {"ä": "ae", "ö": "oe", "ü": "ue", "Ä": "Ae", "Ö": "Oe", "Ü": "Ue", "ß": "ss", "ẞ": "SS"}
    | {"æ": "ae", "Æ": "Ae", "ø": "o", "Ø": "O", "œ": "oe", "Œ": "Oe", "ł": "l", "Ł": "L", "đ": "d", "Đ": "D"}
    | {"ð": "d", "Ð": "D", "þ": "th", "Þ": "Th", "ı": "i"}
)
"""Letters that Unicode does not decompose into an ASCII letter, and German umlauts."""


@dataclass(frozen=True)
class DatasetDraft:
    """A dataset of the recipe to write.

    Attributes:
        name: Its name before `dataset_names`, with any characters.
        keys: Recipe keys below `datasets[]`, with dots, such as `captions.trigger`; without name and path.
        table: File with the captions of all images of the dataset, which becomes its manifest.
    """

    name: str
    images: ImageFolder
    keys: Mapping[str, Any] = field(default_factory=dict[str, Any])
    table: CaptionTable | None = None

    def captions(self) -> dict[str, Any]:
        """Return the section `captions` of the recipe."""
        given = {key.removeprefix("captions."): self.keys[key] for key in self.keys if "captions." in key}
        for name in ("shuffle", "drop_tags"):
            keys = [key for key in given if key.startswith(f"{name}.")]
            section = {key.removeprefix(f"{name}."): given.pop(key) for key in keys}
            if section.keys() & {"variants", "rate"}:  # the other keys of the section do not enable it
                given[name] = section

        source, text = given.pop("from", "sidecar"), given.pop("text", "")
        suffixes, given_fallback = self.images.suffixes, given.pop("fallback", None)
        given.pop("suffix", None)  # the scan of the images has tried it first
        if self.table is not None:
            column = self.table.caption_column if self.table.is_manifest else "caption"
            return {"from": "column", "columns": [column], **given}
        if source == "filename":
            return {"from": source, **given}
        if source == "fixed" or not suffixes:
            text = text or given_fallback or self.images.text or given.get("trigger") or DEFAULT_CAPTION
            return {"from": "fixed", "text": text, **given}

        captions: dict[str, Any] = {"from": source}
        captions["suffix"] = suffixes[0] if len(suffixes) == 1 else list(suffixes)
        fallback = self.images.text if self.images.num_captions < self.images.num_images else None
        if given_fallback or fallback:
            captions["fallback"] = given_fallback or fallback
        return {**captions, **given}

    def captions_text(self) -> str:
        """Return where the captions come from, for the report."""
        captions = self.captions()
        if captions["from"] == "filename":
            return "captions from file names"
        if captions["from"] == "fixed":
            return f"the caption {captions['text']!r} for all images"
        if self.table is not None:
            return f"captions from {self.table.file}, {self.table.caption_column!r}"
        return f"captions from {' and '.join(self.images.suffixes)}"

    def missing_captions_text(self) -> str:
        """Return a line about images without a caption, or no text."""
        captions, images = self.captions(), self.images
        if captions["from"] == "fixed" and captions["text"] == DEFAULT_CAPTION:
            return f"no caption files were found, so all images get {DEFAULT_CAPTION!r}"
        num_missing = images.num_images - images.num_captions
        if captions["from"] != "sidecar" or num_missing == 0 or "fallback" in captions:
            return ""
        return (
            f"{num_missing:,} of {counted(images.num_images, 'image')} have no caption; set captions.fallback"
        )

    def preview_prompt(self) -> str:
        """Return one caption as training sees it, or no text."""
        captions = self.captions()
        from_files = captions["from"] in ("sidecar", "column")
        text = self.images.prompt if from_files else captions.get("text", "")
        lists = {key: tuple(value) for key, value in captions.items() if isinstance(value, list)}
        return variants(CaptionSettings.model_validate(captions | lists), [text])[0] if text else ""


@dataclass
class RecipeDraft:
    """Everything that a new recipe takes over, and a report.

    Attributes:
        form: Description of what was read, such as "a folder of images".
        keys: Other recipe keys, with dots, such as `latents.flip`.
        taken: Lines about settings that are taken over.
        not_taken: Lines about settings and images that are not, each with the reason.
    """

    form: str
    datasets: list[DatasetDraft] = field(default_factory=list[DatasetDraft])
    keys: dict[str, Any] = field(default_factory=dict[str, Any])
    taken: list[str] = field(default_factory=list[str])
    not_taken: list[str] = field(default_factory=list[str])

    @property
    def num_images(self) -> int:
        """Number of images in all datasets."""
        return sum(each.images.num_images for each in self.datasets)

    def report(self) -> list[str]:
        """Return lines for the terminal."""
        images, datasets = counted(self.num_images, "image"), counted(len(self.datasets), "dataset")
        lines = [f"read {self.form}: {images} in {datasets}"]
        for title, entries in (("taken over", self.taken), ("not taken over", self.not_taken)):
            lines += [f"{title}:", *(f"  {entry}" for entry in entries)] if entries else []
        return lines

    def warnings(self) -> list[str]:
        """Return a line for each dataset without captions, for the end of the report."""
        return [
            f"no captions were found for {each.images.folder}: all of its "
            f"{counted(each.images.num_images, 'image')} get the caption {DEFAULT_CAPTION!r}; write a text "
            "file for each image, such as rose.txt for rose.jpg, or correct `captions` in the recipe"
            for each in self.datasets
            if each.captions().get("text") == DEFAULT_CAPTION
        ]


def draft_from_folder(folder: Path) -> RecipeDraft:
    """Return the folder as one dataset, or one dataset per sub-folder if it has the layout of sd-scripts."""
    parts, remarks = find_repeats_folders(folder)
    if parts:
        draft = RecipeDraft("sd-scripts folders", not_taken=remarks)
        for part in parts:
            keys = {"repeats": part.repeats} if part.repeats is not None else {}
            dataset = DatasetDraft(part.text or part.folder.name, part, keys)
            draft.datasets.append(dataset)
            repeats = f"repeats: {part.repeats}, class tokens {part.text!r}"
            if part.repeats is None:
                repeats = "shown once; its name lacks repeats, so sd-scripts skips it"
            images = counted(part.num_images, "image")
            draft.taken.append(f"{part.folder}: {images}, {dataset.captions_text()}, {repeats}")
            missing = dataset.missing_captions_text()
            draft.not_taken += [f"{part.folder}: {missing}"] if missing else []
        return draft

    complete = scan_folder(folder)
    if complete.num_images == 0:
        raise DatasetError(
            "the folder contains no images",
            where=str(folder.absolute()),
            fix=_shards_fix(folder)
            or "pass another folder; images have suffixes such as jpg, png, webp, tiff or heic",
        )
    tables, remarks = find_caption_tables(folder)
    num_in_tables = sum(len(each.captions) for each in tables)
    if num_in_tables > complete.num_captions:
        return _draft_of_tables(folder, tables, complete, remarks)

    dataset = DatasetDraft(folder.resolve().name, complete)
    missing = dataset.missing_captions_text()
    remarks += [missing] if missing and complete.num_captions else []
    remarks += [
        f"{each.file}: captions of {counted(len(each.captions), 'image')}; more images have text files"
        for each in tables
    ]
    return RecipeDraft("a folder of images", [dataset], not_taken=remarks)


def _shards_fix(folder: Path) -> str:
    """Return how a recipe names the images in the shards of a folder; "" without shards."""
    others = {TAR: "", PARQUET: ", image_column: image"}
    for suffix, keys in others.items():
        num_files = sum(each.suffix.lower() == suffix for each in _visible_files(folder))
        if num_files:
            files, has = counted(num_files, f"{suffix} file"), verb(num_files, "has", "have")
            dataset = f"{{path: {folder / WILDCARD}{suffix}{keys}}}"
            return (
                f"if its {files} {has} images inside, write a recipe with datasets: [{dataset}]; "
                "see docs/recipe_guide.md, Images in shards"
            )
    return ""


def _visible_files(folder: Path) -> list[Path]:
    return [each for each in folder.iterdir() if each.is_file() and not is_hidden(each.name)]


def draft_from_table(file: Path) -> RecipeDraft | None:
    """Return the images in a file of captions as one dataset; None if it has another form."""
    table = read_caption_table(file)
    return None if table is None else _draft_of_tables(file.parent, [table], scan_folder(file.parent), [])


def _draft_of_tables(
    folder: Path, tables: list[CaptionTable], complete: ImageFolder, remarks: list[str]
) -> RecipeDraft:
    draft = RecipeDraft("captions in one file", not_taken=remarks)
    for table in tables:
        captions = table.captions
        prompt = next(iter(captions.values())).partition("\n")[0]
        images = ImageFolder(
            table.file.parent,
            len(captions),
            num_captions=len(captions),
            prompt=prompt if len(prompt) <= MAX_PROMPT else "",
        )
        keys = {"path_column": table.path_column} if table.is_manifest else {}
        name = table.file.parent.resolve().name
        dataset = DatasetDraft(name, images, keys, table)
        draft.datasets.append(dataset)
        draft.taken.append(
            f"{table.file.parent}: {counted(len(captions), 'image')}, {dataset.captions_text()}"
        )
        if table.num_missing:
            entries = counted(table.num_missing, "entry", "entries")
            draft.not_taken.append(f"{table.file}: {entries} without an image")
    num_others = complete.num_images - draft.num_images
    if num_others > 0:
        others = counted(num_others, "image")
        draft.not_taken.append(f"{folder}: {others} without a caption in that file")
    return draft


def dataset_names(wanted: Iterable[str], otherwise: str) -> list[str]:
    """Return a valid name for each wanted one: ASCII, unique in any case, in the same order.

    `otherwise` replaces a name without a letter or digit. Letters are transliterated, `Blüten` to `Blueten`.
    """
    names: list[str] = []
    used: set[str] = set()
    for text in wanted:
        base = name = _ascii_name(text) or otherwise
        number = 2
        while name.casefold() in used:
            name, number = f"{base}-{number}", number + 1
        used.add(name.casefold())
        names.append(name)
    return names


def _ascii_name(text: str) -> str:
    composed = unicodedata.normalize("NFC", text).translate(_LETTERS)
    letters: list[str] = []
    for letter in unicodedata.normalize("NFKD", composed):
        if letter.isascii():
            letters.append(letter)
        elif letter.isalnum():
            # The code point, so that names in any script stay distinct.
            letters.append(f"u{ord(letter):04x}")
        elif not unicodedata.combining(letter):
            letters.append("_")
    return re.sub(r"[^A-Za-z0-9_-]+", "_", "".join(letters)).strip("_")
