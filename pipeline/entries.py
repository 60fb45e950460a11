"""Which store entry an image or a caption asks for, under one recipe.

The cache assets, their checks and the trainer all ask here, so they cannot disagree about a key or a shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipeline.families import Family, Use, detect
from pipeline.fingerprints import Fingerprints, LatentInputs, TextInputs, latent_key, text_key
from pipeline.geometry import Geometry
from pipeline.images import PREPROCESSING_VERSION
from pipeline.model_source import resolve_base
from pipeline.store import EntrySpec, EntryStat, Store, TensorSpec

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.recipe import Recipe


class Entries:
    """The entries of one recipe; imports no torch, and looks for the base model when it is first needed."""

    def __init__(self, recipe: Recipe) -> None:
        """Nothing is read yet."""
        self.recipe = recipe
        self.store = Store(recipe.cache_dir)
        self._fingerprints: dict[Use, str] = {}

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
        return detect(self.model_folder)

    def fingerprint(self, use: Use) -> str:
        """Of the parts of the base model that decide the bytes of `use`: 64 hex digits.

        Raises:
            ModelError: A file of them is missing or unreadable.
        """
        if use not in self._fingerprints:
            self._fingerprints[use] = Fingerprints(self.recipe.cache_dir).of(self.family.parts(use))
        return self._fingerprints[use]

    def latent_inputs(self, row: Mapping[str, Any]) -> LatentInputs:
        """What decides the latent of one row of aspect_buckets or vae_latents."""
        settings, geometry = self.recipe.latents, Geometry.from_row(row)
        return LatentInputs(
            content_hash=row["content_hash"],
            resized_size=geometry.resized_size,
            crop=geometry.crop,
            flip=False,
            background=settings.background,
            preprocessing_version=PREPROCESSING_VERSION,
            vae=self.fingerprint("latents"),
            method=self.family.latent_method,
            posterior=settings.posterior,
            compute_dtype=settings.compute_dtype,
            dtype=settings.dtype,
        )

    def latent(self, row: Mapping[str, Any]) -> EntrySpec:
        """The entry of one row of aspect_buckets or vae_latents: one tensor "latent" (C, h, w)."""
        shape = self.family.latent_shape(Geometry.from_row(row).target_size)
        tensor = TensorSpec(self.recipe.latents.dtype, shape)
        return EntrySpec("latents", latent_key(self.latent_inputs(row)), {"latent": tensor})

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

    def text(self, caption: str) -> EntrySpec:
        """The entry of one canonical caption, "" included: tensors as `Family.text_shapes` names them."""
        dtype = self.recipe.text.dtype
        tensors = {name: TensorSpec(dtype, shape) for name, shape in self._text_shapes.items()}
        return EntrySpec("text", text_key(self.text_inputs(caption)), tensors)

    @cached_property
    def _text_shapes(self) -> dict[str, tuple[int, ...]]:
        return self.family.text_shapes()


def recorded_stat(row: Mapping[str, Any]) -> EntryStat:
    """The stat of a row's entry when it was last verified."""
    return EntryStat(row["entry_bytes"], row["entry_mtime_ns"], row["entry_ctime_ns"], row["entry_inode"])


def stat_columns(stat: EntryStat) -> dict[str, int]:
    """The columns in which `recorded_stat` finds it again."""
    return {
        "entry_bytes": stat.num_bytes,
        "entry_mtime_ns": stat.mtime_ns,
        "entry_ctime_ns": stat.ctime_ns,
        "entry_inode": stat.inode,
    }
