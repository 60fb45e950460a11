"""Keys of cache entries: hashes of everything that decides an entry's bytes, and of nothing else.

Names, paths, batch size, device, number of workers and order are not part of a key.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from pipeline.images.geometry import Crop, Size
from pipeline.models.fingerprints import canonical_hash, canonical_text
from pipeline.versions import PREPROCESSING_VERSION

if TYPE_CHECKING:
    import polars as pl

_ROWS_AT_A_TIME = 4096


@dataclass(frozen=True)
class LatentInputs:
    """Everything that decides the bytes of a latent; the encoder receives the same values.

    Attributes:
        content_hash: SHA-256 of the image file's bytes.
        resized_size: Size after scaling, before the crop.
        crop: Crop in resized pixels.
        flip: Whether the pixels are mirrored left to right.
        background: Red, green and blue behind transparent pixels, 0 to 255.
        preprocessing_version: See `preprocessing_of`.
        vae: Fingerprint of the VAE's configuration and weights.
        method: The family's `latent_method`.
        posterior: "sample", "mean" or "moments".
        compute_dtype: Dtype in which the VAE computes.
        dtype: Dtype of the stored tensors.
    """

    content_hash: str
    resized_size: Size
    crop: Crop
    flip: bool
    background: tuple[int, int, int]
    preprocessing_version: int | str
    vae: str
    method: str
    posterior: str
    compute_dtype: str
    dtype: str


@dataclass(frozen=True)
class TextInputs:
    """Everything that decides the bytes of a caption's text embeddings.

    Attributes:
        caption: Canonical caption.
        encoders: Fingerprint of all text encoders and tokenizers.
        method: The family's `text_method`.
        max_length: Maximum number of tokens.
        compute_dtype: Dtype in which the encoders compute.
        dtype: Dtype of the stored tensors.
        references: Images that the encoder sees next to the caption, and how it sees them; None without.
    """

    caption: str
    encoders: str
    method: str
    max_length: int
    compute_dtype: str
    dtype: str
    references: Mapping[str, Any] | None = None

    def values(self) -> dict[str, Any]:
        """Return the inputs by name, without `references` if there are none."""
        # Keys from before text encoders could see references have no such field, and stay valid.
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class MaskInputs:
    """Everything that decides the bytes of a mask's entry.

    Attributes:
        mask_hash: SHA-256 of the mask file's bytes, or of the image's for its opacity.
        source: "file" or "alpha".
        resized_size: Size of the image after scaling, before the crop.
        crop: Crop in resized pixels.
        flip: Whether the image is mirrored left to right.
        factor: Number of pixels per weight along an edge.
        preprocessing_version: See `preprocessing_of`.
        dtype: Dtype of the stored weights.
    """

    mask_hash: str
    source: str
    resized_size: Size
    crop: Crop
    flip: bool
    factor: int
    preprocessing_version: int | str
    dtype: str


def preprocessing_of(decoding: str | None) -> int | str:
    """Return what decides how an image's bytes become pixels; `decoding` names its decoding rules.

    This is `PREPROCESSING_VERSION`, and for images with decoding rules a text that also has their names.
    """
    # Nearly all images have no such rules, so a new rule leaves their keys as they are.
    return PREPROCESSING_VERSION if decoding is None else f"{PREPROCESSING_VERSION} {decoding}"


def preprocessing_json() -> pl.Expr:
    """Return `preprocessing_of` of the column `decoding`, in JSON."""
    import polars as pl  # encoding processes import this module but have no use for Polars

    with_rules = pl.format('"{} {}"', pl.lit(PREPROCESSING_VERSION), "decoding")
    return with_rules.fill_null(str(PREPROCESSING_VERSION))


def latent_key(inputs: LatentInputs) -> str:
    """Return the key of a latent: 64 hex digits."""
    return canonical_hash({"latents": vars(inputs)})


def text_key(inputs: TextInputs) -> str:
    """Return the key of a caption's text embeddings: 64 hex digits."""
    return canonical_hash({"text": inputs.values()})


class KeyTemplate:
    """Canonical JSON with placeholders, to compute many keys that differ in a few values."""

    def __init__(self, value: Any) -> None:
        """Serialise `value`, a JSON-serialisable object in which a string "@name@" is a placeholder."""
        # Serialising the constant part once takes a tenth of the time of `canonical_hash` per key.
        parts = re.split(r'"@(\w+)@"', canonical_text(value))
        self._texts, self.names = parts[::2], tuple(parts[1::2])

    def hashes(self, values: pl.DataFrame, in_json: Mapping[str, pl.Expr] | None = None) -> pl.Series:
        """Return one hash per row of `values`, about a microsecond each.

        `values` has one column per placeholder. `in_json` has expressions that turn a column into canonical
        JSON, for columns that are not JSON yet.
        """
        import polars as pl  # encoding processes import this module but have no use for Polars

        start, *texts = self._texts
        columns = [(in_json or {}).get(name, pl.col(name)) for name in self.names]
        pairs = zip(columns, map(pl.lit, texts), strict=True)
        document = pl.concat_str(pl.lit(start), *chain.from_iterable(pairs)).cast(pl.Binary)

        # In slices, because the documents take many times the memory of the keys.
        parts = [
            pl.Series([hashlib.sha256(text).hexdigest() for text in rows.select(document).to_series()])
            for rows in values.iter_slices(_ROWS_AT_A_TIME)
        ]
        return pl.concat(parts) if parts else pl.Series(dtype=pl.String)
