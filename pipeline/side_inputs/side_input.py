"""The description of one kind of side inputs, which validation, cache, encoding and training share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import polars as pl

from pipeline.cache.recipe_entries import STATS, TARGET
from pipeline.cache.store import EntrySpec, Kind, TensorSpec
from pipeline.images.formats import ImageError
from pipeline.images.geometry import Size
from pipeline.raw_images.scan_index import SIDE_INPUT

if TYPE_CHECKING:
    from pipeline.cache.recipe_entries import RecipeEntries
    from pipeline.errors import BucketError
    from pipeline.recipe import DatasetSettings, Recipe
    from pipeline.recipe.datasets import SideInputSettings

Row = dict[str, Any]

VIEW = ("sample_id", "bucket", "flipped")
"""Columns that identify a row of vae_latents."""

GEOMETRY: dict[str, Any] = dict.fromkeys(
    ("height", "width", "resized_height", "resized_width", "crop_top", "crop_left", *TARGET), pl.Int32
)
"""Columns of a geometry and their types, in the order of its fields."""

RECORDED: dict[str, Any] = {
    "sample_id": pl.String,
    "bucket": pl.String,
    "flipped": pl.Boolean,
    "number": pl.Int32,
    "content_hash": pl.String,
    "key": pl.String,
    **STATS,
}
"""Columns of the entries that a table of vae_latents recorded, and their types."""


@dataclass(frozen=True, eq=False)
class SideInput(ABC):
    """A kind of files that belong to images.

    A *file row* is a mapping with the facts of one file. An *entry row* is a row of `entry_rows`.

    Attributes:
        name: Name of one file, and with `_` the prefix of the reasons for which a sample is rejected.
        plural: Name of several files. It begins the names of checks, and is the name of the index file, of
            keys in the report, and of a column of the training inputs.
        recipe_key: Key of the section in the recipe's `datasets`.
        add_file: How to add a missing file; `{folder}` stands for the folder of such files, and `{name}` for
            the file's path in it without suffix.
        hash_column: Column of the tables that is null for samples without such files.
        keys_column: Column of vae_latents with the keys of the entries.
        absent: Reasons of samples without exactly one file, without prefix.
        samples_counter: Key of the report with the number of samples that have such files.
        several: Whether an image may have several files, so that they are numbered.
        only_geometry: Whether an entry depends on nothing but the file and the geometry of its image.
        outdated: Problem of a row of vae_latents that lacks the current entries.
        more_facts: Further facts of a file, in addition to `SIDE_INPUT`: names to types.
        condition: Name under which the denoiser gets the latents of the files; None if it does not see them.
    """

    name: str
    plural: str
    recipe_key: str
    add_file: str
    hash_column: str
    keys_column: str
    absent: tuple[str, ...]
    kind: Kind
    samples_counter: str
    several: bool
    only_geometry: bool
    outdated: str
    more_facts: Mapping[str, Any]
    condition: str | None

    # Files: found and read by validated_dataset.

    def sections(self, dataset: DatasetSettings) -> list[SideInputSettings]:
        """Return the dataset's sections of this kind, in order; empty if it has no such files."""
        return [each.settings for each in dataset.side_inputs if each.kind == self.recipe_key]

    def numbers(self, recipe: Recipe) -> dict[str, int]:
        """Return the number of files of an image in each dataset that has some, by the dataset's name."""
        numbers = {dataset.name: len(self.sections(dataset)) for dataset in recipe.datasets}
        return {name: number for name, number in numbers.items() if number}

    def reads_as(self, settings: SideInputSettings) -> str:
        """Return how `read` reads the files of a section."""
        return "file"

    @abstractmethod
    def read(self, recipe: Recipe, opened: BinaryIO, kind: str) -> Row:
        """Decode an open file completely and return `height`, `width` and `more_facts`.

        Raises:
            ImageError: The file cannot be used.
        """

    @abstractmethod
    def columns(self, image: Row, files: Sequence[Row]) -> Row:
        """Return the columns that record a sample's files in validated_dataset.

        Raises:
            ImageError: The files do not suit the image.
        """

    @property
    def facts(self) -> dict[str, Any]:
        """Columns of the index of files that earlier runs read, names to types."""
        return {**SIDE_INPUT, **self.more_facts}

    def error(self, err: ImageError, file: object) -> ImageError:
        """Return the error of a file as an error of its image, with the file's name and the prefix."""
        prefix = f"{self.name}_"
        reason = err.reason if err.reason.startswith(prefix) else f"{prefix}{err.reason}"
        return ImageError(reason, f"the {self.name} {file}: {err.detail}", fix=err.fix)

    # Tables: which files a row has.

    @abstractmethod
    def hashes(self) -> pl.Expr:
        """Return the content hashes of a row's files, separated by spaces; null without files."""

    def used(self, recipe: Recipe, rows: pl.DataFrame) -> pl.Series:
        """Return whether each row has such files, and its dataset still uses them."""
        if self.hash_column not in rows.columns:
            return pl.Series([False], dtype=pl.Boolean).new_from_index(0, len(rows))
        return rows[self.hash_column].is_not_null() & rows["dataset"].is_in(list(self.numbers(recipe)))

    # Cache: the entries of the rows of vae_latents.

    @abstractmethod
    def entry_rows(self, entries: RecipeEntries, rows: pl.DataFrame) -> pl.DataFrame:
        """Return one row per file of each row of vae_latents, sorted by row and number.

        Columns are `row` (index into `rows`), `number` (from 0), `sample_id`, `dataset`, `bucket`, `flipped`,
        `path` (relative to the file's folder), `content_hash`, the columns of `GEOMETRY`, and `key`.
        """

    @abstractmethod
    def inputs(self, entries: RecipeEntries, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return everything that decides the bytes of an entry row's entry, by name."""

    @abstractmethod
    def tensors(self, entries: RecipeEntries, target_size: Size) -> dict[str, TensorSpec]:
        """Return the tensors of an entry with this target size."""

    def spec(self, entries: RecipeEntries, row: Mapping[str, Any]) -> EntrySpec:
        """Return the entry of an entry row."""
        return EntrySpec(self.kind, row["key"], self.tensors(entries, Size(*(row[name] for name in TARGET))))

    def keys(self, entries: RecipeEntries, rows: pl.DataFrame) -> pl.Series:
        """Return the keys of each row's entries in order, separated by spaces; null without files."""
        by_row = self.entry_rows(entries, rows).group_by("row", maintain_order=True)
        keys = by_row.agg(keys=pl.col("key").str.join(" "))
        indexed = rows.select(pl.int_range(pl.len(), dtype=pl.UInt32).alias("row"))
        return indexed.join(keys, on="row", how="left", maintain_order="left")["keys"]

    def with_num_bytes(self, entries: RecipeEntries, rows: pl.DataFrame) -> pl.DataFrame:
        """Add `num_bytes` to entry rows: the exact size of the entry's file."""
        # A few sizes instead of many rows: sizes follow from the shape alone.
        sizes = rows.select(TARGET).unique(maintain_order=True)
        num_bytes = [
            EntrySpec(self.kind, "", self.tensors(entries, Size(*size))).file_bytes for size in sizes.rows()
        ]
        sizes = sizes.with_columns(pl.Series("num_bytes", num_bytes, dtype=pl.Int64))
        return rows.join(sizes, on=TARGET, how="left", maintain_order="left")

    def refused(self, entries: RecipeEntries, rows: pl.DataFrame) -> dict[str, BucketError]:
        """Return why the base model refuses a file, by the sample_id of each row with such a file."""
        return {}

    @abstractmethod
    def recorded(self, table: pl.DataFrame | None) -> pl.DataFrame:
        """Return the entries that a table of vae_latents recorded, with the columns `RECORDED`."""

    @abstractmethod
    def with_entries(self, requests: pl.DataFrame, rows: pl.DataFrame, entries: pl.DataFrame) -> pl.DataFrame:
        """Return rows of vae_latents with the columns that record their entries.

        Args:
            requests: Rows of vae_latents with the column `row`.
            rows: Their entry rows.
            entries: Valid entries: `key`, the columns of `STATS`, and facts that encoding adds.
        """

    # Names in messages.

    def label(self, row: Mapping[str, Any]) -> str:
        """Return what an entry row is for its sample, such as "mask" or "reference 1"."""
        return f"{self.name} {row['number']}" if self.several else self.name

    def entry_name(self, row: Mapping[str, Any]) -> str:
        """Return the name of an entry row in messages."""
        path = f" {row['path']}" if self.several else ""
        return f"the {self.name}{path} of {row['sample_id']}"
