"""The section `datasets`: the images, and which of them are used."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field

from pipeline.recipe.buckets import Resolution
from pipeline.recipe.captions import CaptionSettings
from pipeline.recipe.masks import MaskSettings
from pipeline.recipe.references import ReferenceSettings, reference_violations
from pipeline.recipe.settings import MAX_COUNT, Settings, Violation
from pipeline.recipe.validators import (
    MANIFEST_SUFFIXES,
    FolderAddress,
    RecipeAddress,
    check_exclude,
)
from pipeline.recipe.where_expression import check_where
from pipeline.storage.addresses import Address

Pattern = Annotated[str, AfterValidator(check_exclude)]

SIDE_INPUT_KEYS = {"mask": "masks", "references": "references"}
"""Keys of a dataset's side inputs, which are files that belong to its images, and names of such files.

A section has at least `path`, `column` and `suffix`; see `pipeline.side_inputs` for the stages.
"""

SideInputSettings = MaskSettings | ReferenceSettings


class SideInputSection(NamedTuple):
    """One side input that a dataset declares; `key` is its key in the dataset, such as "references[0]"."""

    kind: str
    key: str
    settings: SideInputSettings


class FilterSettings(Settings):
    """Filters on the images of a dataset. rejected.parquet names the filter that rejected an image."""

    min_width: int | None = Field(
        default=None, ge=1, description="Smallest width in pixels, after EXIF orientation."
    )
    max_width: int | None = Field(
        default=None, ge=1, description="Largest width in pixels, after EXIF orientation."
    )
    min_height: int | None = Field(
        default=None, ge=1, description="Smallest height in pixels, after EXIF orientation."
    )
    max_height: int | None = Field(
        default=None, ge=1, description="Largest height in pixels, after EXIF orientation."
    )
    min_pixels: int | None = Field(default=None, ge=1, description="Smallest product of width and height.")
    max_pixels: int | None = Field(default=None, ge=1, description="Largest product of width and height.")
    min_aspect_ratio: float | None = Field(
        default=None, gt=0.0, description="Smallest ratio of width to height."
    )
    max_aspect_ratio: float | None = Field(
        default=None, gt=0.0, description="Largest ratio of width to height."
    )
    where: Annotated[str, AfterValidator(check_where)] | None = Field(
        default=None,
        min_length=1,
        description="SQL expression over the manifest's columns that selects the images to use, such as "
        "`aesthetic > 5 AND language = 'en'`. Queries and functions that read files are refused.",
    )

    def violations(self) -> Iterator[Violation]:
        """See `Settings.violations`."""
        for name in ("width", "height", "pixels", "aspect_ratio"):
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if low is not None and high is not None and low > high:
                what = f"filters.min_{name} must be at most max_{name} ({high}), got {low}"
                yield Violation(f"min_{name}", what, f"set min_{name} to at most {high}")


class DatasetSettings(Settings):
    """A folder or manifest of images with captions. It is never modified."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9_-]+$",
        description="Unique name in the recipe and first part of each sample_id. Letters, digits, _ and -.",
    )
    path: RecipeAddress = Field(
        description="A folder, searched recursively, or a manifest: a .parquet, .jsonl or .csv file with one "
        "row per image; or WebDataset shards such as shards/train-*.tar, in which * stands for any "
        "characters; or Parquet files with `image_column`. "
        "Relative to the project root, or an fsspec address: s3://bucket/photos, gs://, "
        "https:// of a server that lists folders, or zip://photos::data/photos.zip. Remote services need "
        "their package (s3fs for s3://) and take credentials and options from their own configuration or "
        "from fsspec's environment variables (FSSPEC_S3_ENDPOINT_URL), never from a recipe."
    )
    images: FolderAddress | None = Field(
        default=None,
        description="Folder that the paths in a manifest are relative to; null means the manifest's folder. "
        "Relative to the project root, or an address as for `path`.",
    )
    path_column: str = Field(
        default="path",
        min_length=1,
        description="Column of image paths in the manifest: relative to `images`, or absolute paths inside "
        "it.",
    )
    image_column: str | None = Field(
        default=None,
        min_length=1,
        description="Column of images in the Parquet files that `path` names, such as data/train-*.parquet "
        "of a dataset on the Hugging Face Hub: bytes, or a struct with the field bytes. The images are "
        "unpacked once, to the scratch folder, and so are masks and references in a `column`. null means "
        "that `path_column` names files.",
    )
    focus_columns: tuple[str, str] | None = Field(
        default=None,
        description="Two columns of the manifest, x and y, with the point of each image that "
        "`buckets.crop: focus` keeps in view. x is a fraction of the width from the left and y of the height "
        "from the top, from 0 to 1, after EXIF orientation. A missing value means the middle.",
    )
    exclude: tuple[Pattern, ...] = Field(
        default=(),
        description="Patterns of files and folders in the dataset's folder that are ignored, such as [masks, "
        '"*-mask.png"]. A pattern without a slash matches a name at any depth; one with a slash matches a '
        'path from the dataset\'s folder, so "*/*" ignores all subfolders. * matches any characters except '
        "/, ? matches one.",
    )
    captions: CaptionSettings = Field(
        default_factory=lambda: CaptionSettings.model_validate({}),
        description="Source and processing of the captions.",
    )
    mask: MaskSettings | None = Field(
        default=None,
        description="Masks that weight the loss per position. null means that all positions count the same.",
    )
    references: tuple[ReferenceSettings, ...] = Field(
        default=(),
        description="Reference images of each image, in the order in which the model sees them, for base "
        "models that edit images. Each image needs exactly one file for each entry of this list.",
    )
    filters: FilterSettings = Field(
        default_factory=FilterSettings, description="Filters on size, aspect ratio and manifest columns."
    )
    limit: int | None = Field(
        default=None,
        ge=1,
        le=MAX_COUNT,
        description="Maximum number of images, useful to try a recipe on a subset. The choice depends on "
        "image content and is the same in every run. Duplicates are chosen last, unless `duplicates: "
        "keep_all` is set. null means all images.",
    )
    repeats: int = Field(
        default=1,
        ge=1,
        le=MAX_COUNT,
        description="Number of times that training sees each image in one epoch. Repeats share cache "
        "entries.",
    )
    weight: float | None = Field(
        default=None,
        gt=0.0,
        description="Share of training samples from this dataset, relative to the weights of other datasets "
        "and independent of dataset sizes. Set it for all datasets or for none. null means that size and "
        "`repeats` decide.",
    )
    role: Literal["train", "prior"] = Field(
        default="train",
        description="train: images of what the LoRA learns. prior: images of the class that it belongs to, "
        "such as other dogs, so that the model does not forget them; see `training.loss.prior`.",
    )
    slider: Literal[1, -1] | None = Field(
        default=None,
        description="Scale of the LoRA while it trains on these images, for a LoRA that works as a slider: 1 "
        "for images that positive scales should draw, such as smiling faces, and -1 for their "
        "opposite, such as serious faces. A recipe needs datasets of both. An image with 1 and an image with "
        "-1 are a pair if they are in the same bucket and have the same path in their datasets, apart from "
        "the suffix; they share noise, noise level, mirroring and caption dropout. null means an ordinary "
        "dataset.",
    )
    loss_weight: float = Field(
        default=1.0,
        gt=0.0,
        description="Factor of the loss of this dataset's images, and so of what training learns from each "
        "of them: 0.5 halves their gradient. It is not normalised, and reported losses do not include it.",
    )
    resolution: Resolution | None = Field(
        default=None,
        description="Pixel budget of this dataset's buckets, in place of `resolution`, `resolutions` and "
        "`sizes` in `buckets`. All other keys of `buckets` apply. null means as in `buckets`.",
    )
    resolutions: tuple[Resolution, ...] = Field(
        default=(),
        description="Several resolutions for this dataset, in place of `resolution`. `buckets.per_image` "
        "decides which one an image gets.",
    )
    flip: bool | None = Field(
        default=None,
        description="Whether this dataset's images are also cached mirrored, in place of `latents.flip`. "
        "null means as in `latents`.",
    )
    caption_dropout: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="Fraction of this dataset's training samples that get the empty caption, in place of "
        "`text.caption_dropout`. null means as in `text`.",
    )

    follow_links: bool = Field(
        default=False,
        description="Whether caption files and the manifest may be links to files outside their folder. "
        "Captions are published with the LoRA, and archives and repositories of strangers can contain links "
        "to private files. With false, an image with such a caption is rejected as "
        "`caption_outside_dataset`, and such a manifest is an error. Images may be links in both cases, "
        "unless a manifest lists them; the check oddities lists links that lead outside.",
    )
    duplicates: Literal["keep_first", "keep_all"] = Field(
        default="keep_first",
        description="Treatment of files with the same bytes and the same caption. keep_first: use the first "
        "by name, and list the rest in a warning. keep_all: use all of them.",
    )
    validation_fraction: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Approximate fraction of images in the holdout. They are never trained on; the "
        "validation loss is measured on them every `training.validate_every` steps. The choice depends on "
        "image content, is the same in every run, and keeps near duplicates together.",
    )

    @property
    def is_manifest(self) -> bool:
        """True if `path` is a manifest."""
        return self.path.suffix.lower() in MANIFEST_SUFFIXES

    @property
    def root(self) -> Address:
        """Folder that the samples' paths are relative to."""
        if not self.is_manifest:
            return self.path
        return self.path.parent if self.images is None else self.images

    @property
    def side_inputs(self) -> list[SideInputSection]:
        """All side inputs; inputs of the same kind are in the recipe's order."""
        declared: list[SideInputSection] = []
        for kind in SIDE_INPUT_KEYS:
            value: SideInputSettings | tuple[SideInputSettings, ...] | None = getattr(self, kind)
            if isinstance(value, tuple):
                declared += [SideInputSection(kind, f"{kind}[{n}]", each) for n, each in enumerate(value)]
            elif value is not None:
                declared.append(SideInputSection(kind, kind, value))
        return declared

    def side_input_roots(self, kind: str) -> list[Address]:
        """Return the folders that the paths of one kind of side inputs are relative to, in order."""
        return [self.folder_of(each)[1] for each in self.side_inputs if each.kind == kind]

    def folder_of(self, section: SideInputSection) -> tuple[str, Address]:
        """Return the folder of a side input's files, after the key that names it in messages."""
        if section.settings.path is None:
            return f"datasets[].{self.root_key}", self.root
        return f"datasets[].{section.key}.path", section.settings.path

    @property
    def folders(self) -> dict[str, Address]:
        """Folders of the images and side inputs, by the keys that name them in messages."""
        return {f"datasets[].{self.root_key}": self.root, **dict(map(self.folder_of, self.side_inputs))}

    @property
    def root_key(self) -> str:
        """Key that decides `root`."""
        return "path" if self.images is None else "images"

    @property
    def excluded(self) -> tuple[str, ...]:
        """Patterns of files and folders that are not images: `exclude` and all side inputs."""
        if self.is_manifest:
            return self.exclude
        patterns = (self._pattern_of(each.settings) for each in self.side_inputs)
        return (*self.exclude, *(pattern for pattern in patterns if pattern is not None))

    def _pattern_of(self, settings: SideInputSettings) -> str | None:
        # Only files in the dataset's own folder could be taken for images.
        if settings.path is None:
            return None
        if settings.path == self.path:
            return f"*{settings.suffix}.*"
        root, folder = (PurePosixPath(str(each)) for each in (self.path, settings.path))
        return f"/{folder.relative_to(root)}" if folder.is_relative_to(root) else None

    def violations(self) -> Iterator[Violation]:
        """See `Settings.violations`."""
        for kind, key, settings in self.side_inputs:
            # Without a suffix, nothing distinguishes these files from the images.
            if settings.path == self.path and not settings.suffix:
                what = (
                    f"{key}.path must not be the dataset's folder without {key}.suffix, got {settings.path}"
                )
                files = SIDE_INPUT_KEYS[kind]
                fix = f"set {key}.suffix to the end of the {files}' names, or move them to another folder"
                yield Violation(f"{key}.path", what, fix, involves=("path", kind))
        yield from reference_violations(self.references)
        yield from self._prior_violations()
        if self.resolution is not None and self.resolutions:
            what = "resolution and resolutions cannot be used together"
            yield Violation("resolutions", what, "remove one of them", involves=("resolution", "resolutions"))
        if len(set(self.resolutions)) < len(self.resolutions):
            yield Violation("resolutions", "duplicate value in resolutions", "remove one")

        yield from self._packed_violations()
        if self.is_manifest:
            if self.exclude:
                what = f"exclude requires a folder, got the manifest {self.path.name}"
                fix = "set filters.where to an expression over the manifest's columns, or remove this key"
                yield Violation("exclude", what, fix, involves=("path", "exclude"))
            return

        used = {
            "captions.from": self.captions.from_ == "column",
            "filters.where": self.filters.where is not None,
            "path_column": self.path_column != DatasetSettings.model_fields["path_column"].default,
            "focus_columns": self.focus_columns is not None,
            "images": self.images is not None,
            **{f"{each.key}.column": each.settings.column is not None for each in self.side_inputs},
        }
        for key, is_used in used.items():
            if is_used:
                what = f"{key} requires a manifest, got path {self.path.name or self.path}"
                fix = f"set path to a manifest ({', '.join(MANIFEST_SUFFIXES)}), or remove this key"
                yield Violation(key, what, fix, involves=("path", re.split(r"[.[]", key)[0]))

    def _packed_violations(self) -> Iterator[Violation]:
        path, default = self.path, DatasetSettings.model_fields["path_column"].default
        is_parquet = path.suffix.lower() == ".parquet"
        if self.image_column is None:
            if is_parquet and "*" in path.name:
                what = f"a path with * requires image_column or the suffix .tar, got {path.name}"
                fix = "set image_column to the column of images, or path to one manifest"
                yield Violation("path", what, fix, involves=("path", "image_column"))
            return
        if not is_parquet:
            what = f"image_column requires Parquet files, got path {path.name or path}"
            fix = "set path to these files, such as data/*.parquet, or remove image_column"
            yield Violation("image_column", what, fix, involves=("path", "image_column"))
        for key, is_used in {"images": self.images, "path_column": self.path_column != default}.items():
            if is_used:
                what = f"{key} cannot be used with image_column, because the images are in the Parquet files"
                yield Violation(key, what, "remove one of them", involves=("image_column", key))

    def _prior_violations(self) -> Iterator[Violation]:
        captions, involves = self.captions, ("role", "captions")
        if self.role == "prior" and self.slider is not None:
            what = f"slider requires role: train, got role: prior with slider: {self.slider}"
            yield Violation("slider", what, "remove slider or role", involves=("role", "slider"))
        if self.role == "prior" and captions.trigger is not None and captions.class_words is None:
            what = f"captions.trigger requires class_words with role: prior, got trigger {captions.trigger}"
            fix = "set captions.class_words to the words that replace the trigger word, or remove trigger"
            yield Violation("captions.trigger", what, fix, involves)
        if self.role != "prior" and captions.class_words is not None:
            what = f"captions.class_words require role: prior, got role: {self.role}"
            yield Violation("captions.class_words", what, "set role: prior, or remove class_words", involves)


def side_input_sections(dataset: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], dict[str, Any]]]:
    """Yield key path and values of each side input of a dataset as in a recipe's file or its JSON."""
    for kind in SIDE_INPUT_KEYS:
        value = dataset.get(kind)
        if isinstance(value, list):
            yield from (((kind, number), section) for number, section in enumerate(value))
        elif value is not None:
            yield (kind,), value
