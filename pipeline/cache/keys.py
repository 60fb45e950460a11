"""Keys of cache entries: hashes of everything that decides an entry's bytes, and of nothing else.

Whatever is not in `LatentInputs` or `TextInputs` (names, paths, batch size, device, number of workers, order)
cannot make an entry stale, and whatever is in them gives the changed entry another key.
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

if TYPE_CHECKING:
    import polars as pl

_ROWS_AT_A_TIME = 4096


@dataclass(frozen=True)
class LatentInputs:
    """All that decides the bytes of a latent.

    Attributes:
        content_hash: Of the image file's bytes.
        resized_size: After scaling, before the crop.
        crop: In resized pixels.
        flip: Whether the pixels are mirrored left to right.
        background: Red, green, blue behind transparent pixels.
        preprocessing_version: Of the code from file bytes to pixels.
        vae: Fingerprint of the VAE's configuration and weights.
        method: `Family.method_of_latents`.
        posterior: "sample", "mean" or "moments".
        compute_dtype: In which the VAE computes.
        dtype: On disk.
    """

    content_hash: str
    resized_size: Size
    crop: Crop
    flip: bool
    background: tuple[int, int, int]
    preprocessing_version: int
    vae: str
    method: str
    posterior: str
    compute_dtype: str
    dtype: str


@dataclass(frozen=True)
class TextInputs:
    """All that decides the bytes of a caption's text embeddings.

    Attributes:
        caption: Canonical, as the table has it.
        encoders: Fingerprint of all text encoders and tokenizers.
        method: `Family.text_method`.
        max_length: In tokens.
        compute_dtype: In which the encoders compute.
        dtype: On disk.
    """

    caption: str
    encoders: str
    method: str
    max_length: int
    compute_dtype: str
    dtype: str


def latent_key(inputs: LatentInputs) -> str:
    """The key of a latent: 64 hex digits."""
    return canonical_hash({"latents": vars(inputs)})


def text_key(inputs: TextInputs) -> str:
    """The key of a caption's text embeddings: 64 hex digits."""
    return canonical_hash({"text": vars(inputs)})


class KeyTemplate:
    """Hashes of values that differ in a few places: `canonical_hash`, in a tenth of its time.

    The value is written once, with a string "@name@" wherever values differ.
    """

    def __init__(self, value: Any) -> None:
        """Of a JSON-serialisable value with places."""
        parts = re.split(r'"@(\w+)@"', canonical_text(value))
        self._texts, self.names = parts[::2], tuple(parts[1::2])

    def hashes(self, places: pl.DataFrame, in_json: Mapping[str, pl.Expr] | None = None) -> pl.Series:
        """The hash of the value with each row of `places` put in, at a microsecond each.

        Args:
            places: Columns `names`, and any others.
            in_json: How a column becomes a string of canonical JSON, where it is none yet.
        """
        import polars as pl  # only here: an encoding process has no use for it

        start, *texts = self._texts
        columns = [(in_json or {}).get(name, pl.col(name)) for name in self.names]
        pairs = zip(columns, map(pl.lit, texts), strict=True)
        whole = pl.concat_str(pl.lit(start), *chain.from_iterable(pairs)).cast(pl.Binary)
        parts = [
            pl.Series([hashlib.sha256(text).hexdigest() for text in some.select(whole).to_series()])
            for some in places.iter_slices(_ROWS_AT_A_TIME)
        ]
        return pl.concat(parts) if parts else pl.Series(dtype=pl.String)
