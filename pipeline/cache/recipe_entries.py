"""Cache entries that one recipe requests for its images and captions: their keys, shapes and sizes.

The cache stages, their checks, maintenance and the trainer all use this module, so they cannot disagree about
a key or a shape. For a setting that decides the bytes of a latent, add a field to `LatentInputs`, set it in
`RecipeEntries.latent_inputs`, and apply it in `pipeline.vae_latents.worker.encoder`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.cache.entry_format import LATENT, MOMENTS, TEXT
from pipeline.cache.keys import (
    KeyTemplate,
    LatentInputs,
    TextInputs,
    latent_key,
    preprocessing_json,
    preprocessing_of,
    text_key,
)
from pipeline.cache.store import EntrySpec, Kind, Store, TensorSpec
from pipeline.images.geometry import Geometry, Size
from pipeline.log import Log, discard
from pipeline.models.components import resolve_components
from pipeline.models.families import Family, Use, detect
from pipeline.models.families.compute_dtype import dtypes_text
from pipeline.models.families.parts.references import TextImages
from pipeline.models.fingerprints import Fingerprints
from pipeline.models.resolve import resolve_base
from pipeline.storage.addresses import Url
from pipeline.versions import PREPROCESSING_VERSION

if TYPE_CHECKING:
    from pathlib import Path

from pipeline.recipe import Recipe

CAPTION_BYTES_PER_TOKEN = 3
"""Number of UTF-8 bytes per token, for estimates."""

TEMPLATE_TOKENS = 32
"""Number of tokens that a prompt template adds to a caption, for estimates."""

STAT_COLUMNS = ("entry_bytes", "entry_mtime_ns", "entry_ctime_ns", "entry_inode")
"""Columns that record an entry's `EntryStat` at the time it was verified, field by field."""

SEEN = "seen_images"
"""Column of the images that a text encoder sees next to a caption, in order; null without images.

Canonical JSON: a list of [content hash, height, width], with the size that the image processor gets, and as
a fourth item the decoding rules of an image that has some."""

STATS: dict[str, Any] = dict.fromkeys(STAT_COLUMNS, pl.Int64)
"""Types of the `STAT_COLUMNS`."""

TARGET = ("target_height", "target_width")
"""Columns of a target size."""

LATENT_SHAPE = ("latent_channels", "latent_height", "latent_width")
"""Columns of a latent's shape."""

_SHAPE_TYPES = {
    **dict.fromkeys((*TARGET, *LATENT_SHAPE), pl.Int32),
    "dtype": pl.String,
    "num_bytes": pl.Int64,
}


class RecipeEntries:
    """Resolves the cache entries that a recipe needs; the base model is looked up when it is first used.

    `log` receives the progress of downloading the base model and of hashing its weights.
    """

    def __init__(self, recipe: Recipe, *, log: Log = discard) -> None:
        self.recipe = recipe
        self.log = log
        self.store = Store(recipe.cache_dir)
        self._fingerprints: dict[Use, str] = {}

    @property
    def machine_state_dir(self) -> Path:
        """Folder for machine-local state: cache_dir, or output_dir if the cache is remote."""
        cache_dir = self.recipe.cache_dir
        return self.recipe.output_dir if isinstance(cache_dir, Url) else cache_dir

    @cached_property
    def model_folder(self) -> Path:
        """Folder of the base model; raises ModelError if the model or one of its files is missing."""
        return resolve_base(self.recipe, log=self.log)

    @cached_property
    def component_folders(self) -> dict[str, Path]:
        """Folders of the components that the recipe replaces, by role."""
        return resolve_components(self.recipe, log=self.log)

    @cached_property
    def family(self) -> Family:
        """Family of the base model; raises ModelError as `model_folder`."""
        return detect(self.model_folder, self.component_folders)

    def fingerprint(self, use: Use) -> str:
        """Return the fingerprint of the model parts that decide the bytes of `use`: 64 hex digits.

        Raises:
            ModelError: A file of these parts is missing or unreadable.
        """
        # Hashing gigabytes of weights takes long, and all keys of a run need it.
        if use not in self._fingerprints:
            parts = self.family.fingerprint_parts(use)
            self._fingerprints[use] = Fingerprints(self.machine_state_dir, log=self.log).of(parts)
        return self._fingerprints[use]

    @property
    def vae_compute_dtype(self) -> str:
        """Dtype in which the VAE runs, never "auto"."""
        return self.family.vae_compute_dtype(self.recipe.latents.compute_dtype)

    @property
    def text_compute_dtypes(self) -> dict[str, str]:
        """Dtypes in which the text encoders run, by component, never "auto"."""
        return self.family.text_compute_dtypes(self.recipe.text.compute_dtype)

    def latent_inputs(self, row: Mapping[str, Any]) -> LatentInputs:
        """Return everything that decides the latent of a row of aspect_buckets or vae_latents."""
        settings, geometry = self.recipe.latents, Geometry.from_row(row)
        return LatentInputs(
            content_hash=row["content_hash"],
            resized_size=geometry.resized_size,
            crop=geometry.crop,
            flip=bool(row.get("flipped", False)),
            background=settings.background,
            preprocessing_version=preprocessing_of(row.get("decoding")),
            vae=self.fingerprint("latents"),
            method=self.family.spec.latents.method_of(self.family.model),
            posterior=settings.posterior,
            compute_dtype=self.vae_compute_dtype,
            dtype=settings.dtype,
        )

    def latent_spec(self, row: Mapping[str, Any]) -> EntrySpec:
        """Return the entry of a row of aspect_buckets or vae_latents."""
        tensors = self.latent_tensors(Geometry.from_row(row).target_size)
        return EntrySpec("latents", latent_key(self.latent_inputs(row)), tensors)

    def latent_tensors(self, target_size: Size) -> dict[str, TensorSpec]:
        """Return the tensors (C, h, w) of a latent's entry: `LATENT`, or both `MOMENTS`."""
        tensor = TensorSpec(self.recipe.latents.dtype, self.family.latent_shape(target_size))
        names = MOMENTS if self.recipe.latents.posterior == "moments" else (LATENT,)
        return dict.fromkeys(names, tensor)

    def latent_requests(self, buckets: pl.DataFrame) -> pl.DataFrame:
        """Return one row per latent that the recipe needs; several rows may share an entry.

        The columns are the columns of `buckets` (the table aspect_buckets), `flipped`, `key`, the latent's
        shape and dtype, and `num_bytes`, the size of the entry's file.
        """
        rows = self.with_mirrored(buckets)
        rows = rows.with_columns(self.latent_keys(rows).alias("key"))
        return rows.join(self.latent_shapes(rows), on=TARGET, how="left", maintain_order="left")

    def with_mirrored(self, buckets: pl.DataFrame) -> pl.DataFrame:
        """Add the column `flipped`, and a mirrored row for each row of a dataset that is mirrored."""
        # The geometry of a mirrored row is the plain one: the encoder mirrors the cropped pixels.
        plain, names = buckets.with_columns(flipped=pl.lit(False)), self.recipe.mirrored_datasets
        if not names:
            return plain
        mirrored = buckets.with_columns(flipped=pl.lit(True))
        if len(names) < len(self.recipe.datasets):
            mirrored = mirrored.filter(pl.col("dataset").is_in(names))
        return pl.concat([plain, mirrored])

    def latent_shapes(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return shape, dtype and `num_bytes` of the latents, one row per target size in `rows`."""
        shapes: list[dict[str, Any]] = []
        for height, width in rows.select(TARGET).unique(maintain_order=True).rows():
            tensors = self.latent_tensors(Size(height, width))
            # Both moments have one shape and dtype.
            tensor = next(iter(tensors.values()))
            num_bytes = EntrySpec("latents", "", tensors).file_bytes
            values = (height, width, *tensor.shape, tensor.dtype, num_bytes)
            shapes.append(dict(zip(_SHAPE_TYPES, values, strict=True)))
        return pl.DataFrame(shapes, schema=_SHAPE_TYPES)

    def latent_keys(self, rows: pl.DataFrame) -> pl.Series:
        """Return the keys of `latent_spec` for all rows of vae_latents, about a microsecond each."""
        if rows.is_empty():
            return pl.Series(dtype=pl.String)

        # All inputs of the first row are common to all rows, except the inputs in these columns.
        inputs = vars(self.latent_inputs(rows.row(0, named=True)))
        resized = ("resized_height", "resized_width")
        crop = ("crop_top", "crop_left", *TARGET)
        placeholders: dict[str, Any] = {
            "content_hash": "@content_hash@",
            "flip": "@flipped@",
            "resized_size": [f"@{name}@" for name in resized],
            "crop": [f"@{name}@" for name in crop],
            "preprocessing_version": "@decoding@",
        }
        template = KeyTemplate({"latents": inputs | placeholders})
        in_json = {name: pl.col(name).cast(pl.String) for name in template.names}
        in_json |= {"content_hash": pl.format('"{}"', "content_hash"), "decoding": preprocessing_json()}

        # Only tables with an image that has decoding rules have the column.
        if "decoding" not in rows.columns:
            rows = rows.with_columns(decoding=pl.lit(None, pl.String))
        return template.hashes(rows, in_json)

    @cached_property
    def text_images(self) -> TextImages | None:
        """How the text encoder sees the recipe's references; None if it sees none."""
        recipe = self.recipe
        # Checked before the family, because finding the family reads the base model's files.
        if not any(each.references for each in (*recipe.datasets, *recipe.training.sample_prompts)):
            return None
        return self.family.text_images

    @property
    def sees_images_in_negative(self) -> bool:
        """Whether negative prompts and the empty caption are encoded with the recipe's references."""
        return self.text_images is not None and self.text_images.in_negative

    def text_inputs(self, caption: str, images: str | None = None) -> TextInputs:
        """Return everything that decides the text embeddings of a canonical caption.

        `images` are the images that the encoder sees next to it, see `SEEN`.
        """
        return TextInputs(
            references=None if images is None else self._reference_inputs(images),
            caption=caption,
            encoders=self.fingerprint("text"),
            method=self.family.spec.text.method,
            max_length=self.family.max_length(),
            compute_dtype=dtypes_text(self.text_compute_dtypes),
            dtype=self.recipe.text.dtype,
        )

    def _reference_inputs(self, images: str) -> dict[str, Any]:
        assert self.text_images is not None, f"the text encoder of {self.family.spec.name} sees no images"
        return {
            "images": json.loads(images),
            "background": list(self.recipe.latents.background),
            "preprocessing_version": PREPROCESSING_VERSION,
            "processor": self.text_images.processor,
            "processor_settings": self.family.image_processor_settings(),
        }

    def text_spec(self, caption: str, length: int | None = None, images: str | None = None) -> EntrySpec:
        """Return the entry of a canonical caption, which may be empty; for `images` see `SEEN`.

        If the family stores captions at their own length, `length` is the length of the `text_embedding`.
        None gives a ragged specification: the header has the length.
        """
        return EntrySpec("text", text_key(self.text_inputs(caption, images)), self.text_tensors(length))

    def text_tensors(self, length: int | None = None) -> dict[str, TensorSpec]:
        """Return the tensors of a caption's entry; `length` as for `text_spec`."""
        dtype = self.recipe.text.dtype
        tensors = {name: TensorSpec(dtype, shape) for name, shape in self._text_shapes.items()}
        if self._text_embedding.ragged:
            exact = TensorSpec(dtype, (length or 0, *self._text_embedding.shape[1:]))
            tensors[TEXT] = self._text_embedding if length is None else exact
        return tensors

    def text_requests(
        self,
        captions: Iterable[str],
        previous: pl.DataFrame | None = None,
        recorded: Mapping[str, Any] = MappingProxyType({}),
        *,
        images: pl.Series | None = None,
    ) -> pl.DataFrame:
        """Return one row per caption.

        Args:
            captions: Canonical captions.
            previous: Earlier table text_embeddings with the columns `key`, `text_length` and `recorded`.
            recorded: Further columns to copy from `previous`, names to types.
            images: Images that the encoder sees next to each caption, which become the column `SEEN`.

        Returns:
            `caption`, `key`, `text_length`, `num_bytes` (exact size of the entry's file), `about_bytes` (that
            size or an estimate) and the `recorded` columns. If captions are stored at their own length,
            `text_length` and `num_bytes` are null for keys that are not in `previous`.
        """
        rows = pl.DataFrame({"caption": pl.Series(captions, dtype=pl.String)})
        if images is not None:
            rows = rows.with_columns(images.alias(SEEN))
        rows = rows.with_columns(self.text_keys(rows["caption"], images).alias("key"))

        max_length, max_bytes = self._text_embedding.shape[0], self._max_text_bytes
        if not self._text_embedding.ragged:
            return with_recorded(rows, previous, recorded).with_columns(
                text_length=pl.lit(max_length, pl.Int32),
                num_bytes=pl.lit(max_bytes, pl.Int64),
                about_bytes=pl.lit(max_bytes, pl.Int64),
            )

        rows = with_recorded(rows, previous, {"text_length": pl.Int32, **recorded})

        # The length in tokens is known only after encoding; until then, the size is estimated from the text.
        missing_tokens = max_length - pl.col("text_length").cast(pl.Int64)
        caption_bytes = pl.col("caption").str.len_bytes().cast(pl.Int64)

        # Rounded up, since the estimate decides whether the disk has enough space.
        tokens = TEMPLATE_TOKENS + (caption_bytes + CAPTION_BYTES_PER_TOKEN - 1) // CAPTION_BYTES_PER_TOKEN
        if images is not None and self.text_images is not None:
            tokens += _num_images() * self.text_images.num_tokens
        estimate = max_bytes - pl.max_horizontal(0, max_length - tokens) * self._bytes_per_token
        rows = rows.with_columns(num_bytes=max_bytes - missing_tokens * self._bytes_per_token)
        return rows.with_columns(about_bytes=pl.coalesce("num_bytes", estimate))

    def text_keys(self, captions: Iterable[str], images: pl.Series | None = None) -> pl.Series:
        """Return the keys that `text_spec` gives for many captions, in about 2 microseconds each.

        `images` has the images that the encoder sees next to each caption (see `SEEN`), or null.
        """
        in_json = {"caption": pl.col("caption").map_batches(_as_json, pl.String)}
        template = KeyTemplate({"text": {**self.text_inputs("").values(), "caption": "@caption@"}})
        rows = pl.DataFrame({"caption": pl.Series(captions, dtype=pl.String)})
        if images is None or images.null_count() == len(images):
            return template.hashes(rows, in_json)

        # The text of `images` is canonical JSON, as in the key of a single entry.
        values = self.text_inputs("", "[]").values()
        values |= {"caption": "@caption@", "references": {**values["references"], "images": f"@{SEEN}@"}}
        rows, sees = rows.with_columns(images.alias(SEEN)), images.is_not_null()
        keys = pl.Series([None], dtype=pl.String).new_from_index(0, len(rows))
        keys = keys.scatter((~sees).arg_true(), template.hashes(rows.filter(~sees), in_json))
        return keys.scatter(sees.arg_true(), KeyTemplate({"text": values}).hashes(rows.filter(sees), in_json))

    @cached_property
    def _text_shapes(self) -> dict[str, tuple[int, ...]]:
        return self.family.text_shapes()

    @cached_property
    def _text_embedding(self) -> TensorSpec:
        """The `text_embedding` of a caption of unknown length."""
        ragged = self.family.spec.text.padding != "stored"
        return TensorSpec(self.recipe.text.dtype, self._text_shapes[TEXT], ragged)

    @cached_property
    def _bytes_per_token(self) -> int:
        return self._text_embedding.num_bytes // self._text_embedding.shape[0]

    @cached_property
    def _max_text_bytes(self) -> int:
        return EntrySpec("text", "", self.text_tensors(None)).file_bytes


def with_recorded(
    rows: pl.DataFrame, previous: pl.DataFrame | None, columns: Mapping[str, Any] = STATS
) -> pl.DataFrame:
    """Add columns that an earlier table recorded for the same key; null for other keys."""
    # The columns exist in any case, because later steps compare them with the current stats.
    if previous is None:
        return rows.with_columns(pl.lit(None, kind).alias(name) for name, kind in columns.items())

    # Rows that share an entry recorded the same stat.
    recorded = previous.select("key", *columns).unique("key", keep="first")
    return rows.join(recorded, on="key", how="left", maintain_order="left")


def is_unchanged(store: Store, kind: Kind, rows: pl.DataFrame) -> pl.Series:
    """Return for each row whether its entry's file is unchanged since its stat was recorded.

    `rows` has the columns `key`, `num_bytes` (exact size of the file, null if unknown) and `STAT_COLUMNS`
    (null if nothing was recorded).
    """
    # `eq_missing`, so that a missing entry differs from a recorded one and nothing is null.
    current = pl.DataFrame(store.stats(kind, rows["key"]), schema=STATS, orient="row")
    unchanged = current["entry_bytes"].eq_missing(rows["num_bytes"].cast(pl.Int64))
    for name in STAT_COLUMNS:
        unchanged &= current[name].eq_missing(rows[name].cast(pl.Int64))
    return unchanged


def _num_images() -> pl.Expr:
    return pl.col(SEEN).str.json_decode(pl.List(pl.List(pl.String))).list.len().cast(pl.Int64).fill_null(0)


def _as_json(captions: pl.Series) -> pl.Series:
    return pl.Series([json.dumps(caption) for caption in captions], dtype=pl.String)
