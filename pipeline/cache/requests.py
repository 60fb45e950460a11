"""Which store entry an image or a caption asks for, under one recipe.

The cache assets, their checks and the trainer all ask here, so they cannot disagree about a key or a shape.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import astuple
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from pipeline.cache.entry_format import LATENT, MOMENTS, TEXT
from pipeline.cache.keys import KeyTemplate, LatentInputs, TextInputs, latent_key, text_key
from pipeline.cache.remote_store import store_at
from pipeline.cache.store import EntrySpec, EntryStat, Kind, Store, TensorSpec
from pipeline.images.geometry import Geometry, Size
from pipeline.models.components import resolve_components
from pipeline.models.families import Family, Use, detect
from pipeline.models.fingerprints import Fingerprints
from pipeline.models.resolve import resolve_base
from pipeline.storage.addresses import Url
from pipeline.storage.columns import beside, put_beside, strings, with_constant
from pipeline.storage.tables import in_order
from pipeline.versions import PREPROCESSING_VERSION

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.recipe import Recipe


CAPTION_BYTES_PER_TOKEN = 3
TEMPLATE_TOKENS = 32
"""What an estimate reckons with: bytes of UTF-8 that are a token, and tokens beside the caption's own."""

STAT_COLUMNS = ("entry_bytes", "entry_mtime_ns", "entry_ctime_ns", "entry_inode")
"""Of tables: an entry's `EntryStat` when it was last verified, field by field."""

STATS: dict[str, Any] = dict.fromkeys(STAT_COLUMNS, pl.Int64)
"""Their types."""


TARGET = ("target_height", "target_width")
LATENT_SHAPE = ("latent_channels", "latent_height", "latent_width")

_SHAPES = {
    **dict.fromkeys((*TARGET, *LATENT_SHAPE), pl.Int32),
    "dtype": pl.String,
    "num_bytes": pl.Int64,
}


class RecipeEntries:
    """The entries of one recipe; imports no torch, and looks for the base model when it is first needed."""

    def __init__(self, recipe: Recipe) -> None:
        """Nothing is read yet."""
        self.recipe = recipe
        self.store = store_at(recipe.cache_dir)
        self._fingerprints: dict[Use, str] = {}

    @property
    def machine_state_dir(self) -> Path:
        """The folder of what holds for this machine: cache_dir, or output_dir where that is elsewhere."""
        cache_dir = self.recipe.cache_dir
        return self.recipe.output_dir if isinstance(cache_dir, Url) else cache_dir

    @cached_property
    def model_folder(self) -> Path:
        """Of the base model, as `resolve_base`.

        Raises:
            ModelError: It cannot be found, or a file of it is missing.
        """
        return resolve_base(self.recipe)

    @cached_property
    def family(self) -> Family:
        """The base model's family.

        Raises:
            ModelError: As `model_folder`.
        """
        return detect(self.model_folder, self.component_folders)

    @cached_property
    def component_folders(self) -> dict[str, Path]:
        """Of the base model's components that the recipe takes from elsewhere, as `resolve_components`."""
        return resolve_components(self.recipe)

    def fingerprint(self, use: Use) -> str:
        """Of the parts of the base model that decide the bytes of `use`: 64 hex digits.

        Raises:
            ModelError: A file of them is missing or unreadable.
        """
        if use not in self._fingerprints:
            self._fingerprints[use] = Fingerprints(self.machine_state_dir).of(self.family.parts(use))
        return self._fingerprints[use]

    def latent_inputs(self, row: Mapping[str, Any]) -> LatentInputs:
        """What decides the latent of one row of aspect_buckets or vae_latents."""
        settings, geometry = self.recipe.latents, Geometry.from_row(row)
        return LatentInputs(
            content_hash=row["content_hash"],
            resized_size=geometry.resized_size,
            crop=geometry.crop,
            flip=bool(row.get("flipped", False)),
            background=settings.background,
            preprocessing_version=PREPROCESSING_VERSION,
            vae=self.fingerprint("latents"),
            method=self.family.method_of_latents(),
            posterior=settings.posterior,
            compute_dtype=settings.compute_dtype,
            dtype=settings.dtype,
        )

    def latent_spec(self, row: Mapping[str, Any]) -> EntrySpec:
        """The entry of one row of aspect_buckets or vae_latents, with the tensors of `latent_tensors`."""
        tensors = self.latent_tensors(Geometry.from_row(row).target_size)
        return EntrySpec("latents", latent_key(self.latent_inputs(row)), tensors)

    def latent_tensors(self, target_size: Size) -> dict[str, TensorSpec]:
        """Tensors (C, h, w) of such an entry: `LATENT`, or both `MOMENTS` where the recipe asks for them."""
        tensor = TensorSpec(self.recipe.latents.dtype, self.family.latent_shape(target_size))
        names = MOMENTS if self.recipe.latents.posterior == "moments" else (LATENT,)
        return dict.fromkeys(names, tensor)

    def latent_requests(self, buckets: pl.DataFrame) -> pl.DataFrame:
        """A row for each latent that the recipe asks for: those of aspect_buckets, and what follows.

        Added are `flipped`, `key`, `num_bytes` (of the entry's file), and the latent's shape and dtype.
        """
        flips = (False, True) if self.recipe.latents.flip else (False,)
        rows = pl.concat([with_constant(buckets, "flipped", flip, pl.Boolean) for flip in flips])
        sizes = rows.select(TARGET)
        shapes = sizes.join(self.latent_shapes(sizes), on=TARGET, how="left", maintain_order="left")
        keys = self.latent_keys(rows).alias("key")
        return put_beside(rows, pl.DataFrame([keys, *shapes.drop(TARGET)]))

    def latent_shapes(self, rows: pl.DataFrame) -> pl.DataFrame:
        """For each target size in `rows`: the latent's shape and dtype, and its file's `num_bytes`."""
        shapes: list[dict[str, Any]] = []
        for height, width in rows.select(TARGET).unique(maintain_order=True).rows():
            tensors = self.latent_tensors(Size(height, width))
            tensor = next(iter(tensors.values()))
            num_bytes = EntrySpec("latents", "", tensors).file_bytes
            values = (height, width, *tensor.shape, tensor.dtype, num_bytes)
            shapes.append(dict(zip(_SHAPES, values, strict=True)))
        return pl.DataFrame(shapes, schema=_SHAPES)

    def text_requests(
        self,
        captions: Iterable[str],
        known: pl.DataFrame | None = None,
        recorded: Mapping[str, Any] = MappingProxyType({}),
    ) -> pl.DataFrame:
        """A row for each caption.

        Args:
            captions: Canonical ones.
            known: Columns of a table text_embeddings, `key`, `text_length` and `recorded` among them.
            recorded: Which columns of it the answer has too, names to types; null where nothing is known.

        Returns:
            `caption`, `key`, `text_length`, its file's `num_bytes`, `about_bytes`, and `recorded`. Where
            entries are as long as their captions, `text_length` and `num_bytes` are null unless `known` has
            them, and `about_bytes` is an estimate; otherwise the two numbers of bytes are the same.
        """
        texts = pl.Series("caption", captions, dtype=pl.String)
        table = put_beside(texts.to_frame(), self.text_keys(texts).alias("key").to_frame())
        most, longest = self._longest_text_bytes, self._text_spec.shape[0]
        if not self._text_spec.ragged:
            table = with_constant(with_recorded(table, known, recorded), "text_length", longest, pl.Int32)
            return with_constant(table, "num_bytes", most, pl.Int64).with_columns(about_bytes="num_bytes")
        table = with_recorded(table, known, {"text_length": pl.Int32, **recorded})
        lacking = longest - pl.col("text_length").cast(pl.Int64)
        text_bytes = pl.col("caption").str.len_bytes().cast(pl.Int64)
        tokens = TEMPLATE_TOKENS + (text_bytes + CAPTION_BYTES_PER_TOKEN - 1) // CAPTION_BYTES_PER_TOKEN
        about = most - pl.max_horizontal(0, longest - tokens) * self._bytes_per_token
        table = table.with_columns(num_bytes=most - lacking * self._bytes_per_token)
        return table.with_columns(about_bytes=pl.coalesce("num_bytes", about))

    def latent_keys(self, rows: pl.DataFrame) -> pl.Series:
        """The keys of `latent` for every row, at a microsecond each.

        Args:
            rows: Columns of vae_latents, as far as they decide a key.
        """
        if rows.is_empty():
            return pl.Series(dtype=pl.String)
        inputs = vars(self.latent_inputs(rows.row(0, named=True)))
        resized, crop = (
            ("resized_height", "resized_width"),
            ("crop_top", "crop_left", "target_height", "target_width"),
        )
        places: dict[str, Any] = {"content_hash": "@content_hash@", "flip": "@flipped@"}
        places |= {"resized_size": [f"@{name}@" for name in resized], "crop": [f"@{name}@" for name in crop]}
        template = KeyTemplate({"latents": inputs | places})
        in_json = {name: pl.col(name).cast(pl.String) for name in template.names}
        return template.hashes(rows, in_json | {"content_hash": pl.format('"{}"', "content_hash")})

    def text_inputs(self, caption: str) -> TextInputs:
        """What decides the text embeddings of one canonical caption."""
        return TextInputs(
            caption=caption,
            encoders=self.fingerprint("text"),
            method=self.family.text_method,
            max_length=self.family.max_length(),
            compute_dtype=self.recipe.text.compute_dtype,
            dtype=self.recipe.text.dtype,
        )

    def text_spec(self, caption: str, length: int | None = None) -> EntrySpec:
        """The entry of one canonical caption, "" included: tensors as `Family.text_shapes` names them.

        Args:
            caption: Whose.
            length: Of its `text_embedding` where that is the caption's own, as a table recorded it; None: the
                spec is ragged, and the entry's header says.
        """
        return EntrySpec("text", text_key(self.text_inputs(caption)), self.text_tensors(length))

    def text_tensors(self, length: int | None = None) -> dict[str, TensorSpec]:
        """Tensors of a caption's entry, as `text`."""
        dtype = self.recipe.text.dtype
        tensors = {name: TensorSpec(dtype, shape) for name, shape in self._text_shapes.items()}
        if self._text_spec.ragged:
            own = TensorSpec(dtype, (length or 0, *self._text_spec.shape[1:]))
            tensors[TEXT] = self._text_spec if length is None else own
        return tensors

    @cached_property
    def _text_spec(self) -> TensorSpec:
        """Of the `text_embedding` of a caption that nobody knows yet."""
        ragged = self.family.text_padding != "stored"
        return TensorSpec(self.recipe.text.dtype, self._text_shapes[TEXT], ragged)

    @cached_property
    def _bytes_per_token(self) -> int:
        return self._text_spec.num_bytes // self._text_spec.shape[0]

    @cached_property
    def _longest_text_bytes(self) -> int:
        return EntrySpec("text", "", self.text_tensors(None)).file_bytes

    def text_keys(self, captions: Iterable[str]) -> pl.Series:
        """The keys of `text` for every caption, at 2 microseconds each."""
        template = KeyTemplate({"text": {**vars(self.text_inputs("")), "caption": "@caption@"}})
        texts = pl.Series("caption", captions, dtype=pl.String)
        in_json = pl.col("caption").map_batches(_in_json, pl.String)
        return template.hashes(texts.to_frame(), {"caption": in_json})

    @cached_property
    def _text_shapes(self) -> dict[str, tuple[int, ...]]:
        return self.family.text_shapes()


def _in_json(captions: pl.Series) -> pl.Series:
    return pl.Series([json.dumps(caption) for caption in captions], dtype=pl.String)


def with_recorded(
    wanted: pl.DataFrame, known: pl.DataFrame | None, columns: Mapping[str, Any] = STATS
) -> pl.DataFrame:
    """`wanted` with what a table recorded of the same key; null where it has none.

    Args:
        wanted: Column `key`, and others.
        known: Columns `key` and `columns`, and any others.
        columns: Names to types; the `STAT_COLUMNS` by default.
    """
    if known is None:
        for name, kind in columns.items():
            wanted = with_constant(wanted, name, None, kind)
        return wanted
    return beside(wanted, known.select("key", *columns), on="key")


def caption_variants(validated: pl.DataFrame) -> pl.DataFrame:
    """validated_dataset with a row for each variant of a caption: `variant`, from 0, and `caption`."""
    plain = with_constant(validated, "variant", 0, pl.Int32)
    several = plain.filter(pl.col("more_captions") != "[]")
    if several.is_empty():
        return in_order(plain, ["sample_id", "variant"])
    more = several.with_columns(pl.col("more_captions").str.json_decode(pl.List(pl.String)).alias("caption"))
    more = more.with_columns(variant=pl.int_ranges(1, pl.col("caption").list.len() + 1, dtype=pl.Int32))
    return pl.concat([plain, more.explode("caption", "variant")]).sort("sample_id", "variant")


def is_unchanged(store: Store, kind: Kind, rows: pl.DataFrame) -> pl.Series:
    """For each row, whether its entry is as it was when its stat was recorded; Boolean.

    Args:
        store: Where the entries are.
        kind: Of all of them.
        rows: Columns `key`, `num_bytes` (what the entry's shape asks for, null where that is unknown) and
            `STAT_COLUMNS`, null where nothing was recorded.
    """
    found = store.stats(kind, strings(rows["key"]))
    same = np.ones(len(rows), np.bool_)
    for name, values in zip(("num_bytes", *STAT_COLUMNS), (found[:, 0], *found.T), strict=True):
        same &= values == rows[name].cast(pl.Int64).fill_null(-1).to_numpy()
    return pl.Series(same)


def stat_columns(stat: EntryStat) -> dict[str, int]:
    """The columns of a table in which an entry's stat is recorded when it was verified."""
    return dict(zip(STAT_COLUMNS, astuple(stat), strict=True))
