"""The section `datasets`: which images there are, which of them are used, and how they are captioned."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from pipeline.recipe.rules import (
    LISTING_SUFFIXES,
    Broken,
    check_address,
    check_encoding,
    check_folder,
    check_no_listing,
    check_suffix,
    raise_broken,
)
from pipeline.recipe.section import MAX_COUNT, Settings
from pipeline.storage.addresses import Address, Url, is_url


def _address(value: object, as_path: ValidatorFunctionWrapHandler) -> Address:
    return Url(value) if isinstance(value, str) and is_url(value) else as_path(value)


# One schema, a path's, so that a wrong type is one mistake; an address is taken out of it before.
_PATH_OR_URL = [WrapValidator(_address), BeforeValidator(check_address), PlainSerializer(str)]
if TYPE_CHECKING:
    RecipeAddress = Address
    FolderAddress = Address
else:
    RecipeAddress = Annotated[Path, *_PATH_OR_URL]
    FolderAddress = Annotated[Path, *_PATH_OR_URL, BeforeValidator(check_no_listing)]
FolderPath = Annotated[Path, BeforeValidator(check_folder)]
Encoding = Annotated[str, AfterValidator(check_encoding)]
Suffix = Annotated[str, AfterValidator(check_suffix)]

JSON_KEY = "caption"

_ONLY_FROM = {
    "text": "fixed",
    "columns": "column",
    **dict.fromkeys(("suffix", "json_key", "encoding", "fallback_encoding"), "sidecar"),
}
"""Keys of captions, and the one value of `from` with which they mean something."""

MAX_VARIANTS = 64
"""Of one caption: each is an entry in the cache."""


class ShuffleSettings(Settings):
    """Captions that are lists of tags, in several orders."""

    variants: int = Field(
        default=4,
        ge=2,
        le=MAX_VARIANTS,
        description="Orders of each caption that are cached, the written one among them; training draws one "
        "each epoch. The same caption always gets the same orders.",
    )
    separator: str = Field(default=",", min_length=1, description="What stands between two tags.")
    keep: int = Field(default=1, ge=0, description="Tags at the start that stay where they are.")


class CaptionSettings(Settings):
    """Where the captions of one dataset come from."""

    from_: Literal["sidecar", "filename", "fixed", "column"] = Field(
        default="sidecar",
        alias="from",
        description="sidecar: a text file beside each image, named as the image with `suffix`. "
        "filename: the image's name without its suffix. fixed: `text` for every image. column: `columns` of "
        "the listing.",
    )
    suffix: Suffix = Field(
        default=".txt",
        description="Of sidecar files, with its dot: photo.jpg is captioned by photo.txt. With .json a file "
        "holds a JSON object, and `json_key` says where in it the caption is.",
    )
    json_key: str = Field(
        default=JSON_KEY,
        min_length=1,
        description="With `suffix: .json`: the object's key whose text is the caption; of a list of texts, "
        "each is a caption of its own, and training draws one each epoch.",
    )
    text: str | None = Field(
        default=None, min_length=1, description="The caption of every image, with `from: fixed` only."
    )
    columns: tuple[str, ...] = Field(
        default=("caption",),
        min_length=1,
        description="Columns of the listing with `from: column`, of text or of lists of texts; of several "
        "texts, also those of several rows of one image, each is a caption of its own, and training draws "
        "one each epoch.",
    )
    lines: Literal["one", "each"] = Field(
        default="one",
        description="one: a caption is all lines of its file. each: every line is a caption of its own, and "
        "training draws one each epoch.",
    )
    encoding: Encoding = Field(default="utf-8", description="Of sidecar files; a byte order mark wins.")
    fallback_encoding: Encoding | None = Field(
        default=None,
        description="Tried for sidecar files that `encoding` cannot decode, such as cp1252; null: they close "
        "the gate captions_decodable.",
    )
    trigger: str | None = Field(
        default=None,
        min_length=1,
        description="A word that names what is learnt; put before each caption that does not have it.",
    )
    prefix: str = Field(default="", description="Put before each caption, after the trigger word, as it is.")
    postfix: str = Field(default="", description="Put after each caption, as it is.")
    shuffle: ShuffleSettings | None = Field(
        default=None, description="For captions that are lists of tags: several orders of each."
    )

    @model_validator(mode="after")
    def _keys_go_with_from(self) -> CaptionSettings:
        broken: list[Broken] = []
        if self.from_ == "fixed" and self.text is None:
            broken.append(
                Broken("text", "captions are fixed, and there is no text", "set text to the caption")
            )
        for key, needed in _ONLY_FROM.items():
            if self.from_ != needed and getattr(self, key) != CaptionSettings.model_fields[key].default:
                what = f"{key} has no effect with from: {self.from_}"
                broken.append(Broken(key, what, f"set from: {needed}, or remove {key}"))
        if not broken and self.json_key != JSON_KEY and self.suffix.lower() != ".json":
            what = f"json_key has no effect with suffix: {self.suffix}"
            broken.append(Broken("json_key", what, "set suffix: .json, or remove json_key"))
        if broken:
            raise_broken(broken, involves=("from", *_ONLY_FROM))
        return self


class FilterSettings(Settings):
    """Which images of one dataset are left out; each is listed in rejected.parquet with the filter's name."""

    min_width: int | None = Field(default=None, ge=1, description="Pixels, after EXIF orientation.")
    max_width: int | None = Field(default=None, ge=1, description="Pixels, after EXIF orientation.")
    min_height: int | None = Field(default=None, ge=1, description="Pixels, after EXIF orientation.")
    max_height: int | None = Field(default=None, ge=1, description="Pixels, after EXIF orientation.")
    min_pixels: int | None = Field(default=None, ge=1, description="Width times height.")
    max_pixels: int | None = Field(default=None, ge=1, description="Width times height.")
    min_aspect_ratio: float | None = Field(default=None, gt=0.0, description="Width over height.")
    max_aspect_ratio: float | None = Field(default=None, gt=0.0, description="Width over height.")
    where: str | None = Field(
        default=None,
        min_length=1,
        description="An SQL expression over the listing's columns that is true for the images to use, such "
        "as `aesthetic > 5 AND language = 'en'`.",
    )

    @model_validator(mode="after")
    def _min_below_max(self) -> FilterSettings:
        broken: list[Broken] = []
        for name in ("width", "height", "pixels", "aspect_ratio"):
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if low is not None and high is not None and low > high:
                what = f"min_{name} {low} is above max_{name} {high}: no image is left"
                broken.append(Broken(f"min_{name}", what, f"set min_{name} to at most {high}"))
        if broken:
            raise_broken(broken)
        return self


class DatasetSettings(Settings):
    """One folder or listing of images with their captions; it is only ever read."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9_-]+$",
        description="Unique in the recipe; the first part of each sample_id. Letters, digits, _ and -.",
    )
    path: RecipeAddress = Field(
        description="The folder, searched with its subfolders; or a listing: a .parquet, .jsonl or .csv file "
        "with a row an image. Relative to the project root. Or an address that fsspec opens: "
        "s3://bucket/photos, gs://, https:// of a server that lists folders, zip://photos::data/photos.zip; "
        "a service's package has to be installed (s3fs for s3://), and credentials and options come from "
        "its own variables and files and from fsspec's (FSSPEC_S3_ENDPOINT_URL), never from a recipe."
    )
    images: FolderAddress | None = Field(
        default=None,
        description="The folder that the paths in a listing are relative to; null: the listing's own folder. "
        "Relative to the project root, or an address as for path.",
    )
    path_column: str = Field(
        default="path",
        min_length=1,
        description="The listing's column of image paths, relative to `images`, or whole and below it.",
    )
    focus_columns: tuple[str, str] | None = Field(
        default=None,
        description="With `buckets.crop: focus`: the listing's columns of the point of each image to keep in "
        "view, x then y, as shares of the width from the left and of the height from the top, from 0 to 1, "
        "after EXIF orientation. Where they are null it is the middle.",
    )
    captions: CaptionSettings = Field(
        default_factory=lambda: CaptionSettings.model_validate({}),
        description="Where the captions come from.",
    )
    filters: FilterSettings = Field(default_factory=FilterSettings, description="Which images are left out.")
    limit: int | None = Field(
        default=None,
        ge=1,
        le=MAX_COUNT,
        description="Use at most so many images, the same ones each time, chosen by content: a recipe is "
        "tried on 41 images before 41,000. Copies of one image count only where there are no others left, "
        "unless `duplicates` keeps all. null: all.",
    )
    repeats: int = Field(
        default=1,
        ge=1,
        le=MAX_COUNT,
        description="How often training sees each image in one epoch; cached once all the same.",
    )
    weight: float | None = Field(
        default=None,
        gt=0.0,
        description="Share of the training samples that come from this dataset, relative to the weights of "
        "the others, whatever their sizes; for all datasets or none. null: by size and repeats.",
    )

    duplicates: Literal["keep_first", "keep_all"] = Field(
        default="keep_first",
        description="keep_first: of files with the same bytes and the same caption only the first by name is "
        "used, and a warning lists the others. keep_all: each is a sample.",
    )
    validation_fraction: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="About this share of the images is never trained on, and the loss on them is measured "
        "every `training.validate_every` steps. Which ones is decided by what an image holds: the same in "
        "every run, and nothing that looks like one is trained on.",
    )

    @property
    def is_listing(self) -> bool:
        """Whether `path` is a file that lists images."""
        return self.path.suffix.lower() in LISTING_SUFFIXES

    @property
    def root(self) -> Address:
        """The folder that the samples' paths are relative to."""
        if not self.is_listing:
            return self.path
        return self.path.parent if self.images is None else self.images

    @property
    def root_key(self) -> str:
        """The key that decides `root`."""
        return "path" if self.images is None else "images"

    @model_validator(mode="after")
    def _columns_need_a_listing(self) -> DatasetSettings:
        if self.is_listing:
            return self
        broken: list[Broken] = []
        what = f"{self.path.name or self.path} is no listing, and only a listing has columns"
        fix = f"let path name a listing ({', '.join(LISTING_SUFFIXES)}), or remove this"
        if self.captions.from_ == "column":
            broken.append(Broken("captions.from", what, fix))
        if self.filters.where is not None:
            broken.append(Broken("filters.where", what, fix))
        if self.path_column != DatasetSettings.model_fields["path_column"].default:
            broken.append(Broken("path_column", what, fix))
        if self.focus_columns is not None:
            broken.append(Broken("focus_columns", what, fix))
        if self.images is not None:
            broken.append(Broken("images", what, fix))
        if broken:
            keys = ("path", "captions", "filters", "images", "path_column", "focus_columns")
            raise_broken(broken, involves=keys)
        return self
