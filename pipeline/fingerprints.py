"""Keys of cache entries: hashes of everything that decides an entry's bytes, and of nothing else.

Whatever is not in `LatentInputs` or `TextInputs` (names, paths, batch size, device, number of workers, order)
cannot make an entry stale, and whatever is in them gives the changed entry another key.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pipeline.atomic import write_text
from pipeline.errors import ModelError
from pipeline.geometry import Crop, Size

if TYPE_CHECKING:
    import polars as pl

_ROWS_AT_A_TIME = 4096
_MEMORY_FILE = "fingerprints.json"
_RACY_NS = 2_000_000_000
"""A file changed less than this before it was hashed may change again within one tick of its time stamp, so
its hash is not remembered."""

_BLOB_NAME = re.compile(r"[0-9a-f]{64}")
_MEANINGLESS = {"name_or_path", "tokenizer_file", "special_tokens_map_file", "transformers_version"}
"""Configuration keys that say where a file came from. So do those that start with an underscore, except for
`_class_name`."""


@dataclass(frozen=True)
class ModelPart:
    """Files of the base model that decide an artifact's bytes.

    Attributes:
        role: What the part is in its family, such as "vae"; not a path.
        configs: JSON files whose meaning counts; names, paths and package versions in them do not.
        contents: Files whose bytes count.
    """

    role: str
    configs: tuple[Path, ...]
    contents: tuple[Path, ...]


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


def canonical_text(value: Any) -> str:
    """A JSON-serialisable value as ASCII; the order of keys does not matter."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def canonical_hash(value: Any) -> str:
    """The sha256 of a value's `canonical_text`, in hex."""
    return hashlib.sha256(canonical_text(value).encode("ascii")).hexdigest()


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


class Fingerprints:
    """Fingerprints of model files; gigabytes are hashed once, and again only when a file's stat changes.

    The memory is `cache_dir/fingerprints.json`. It may be deleted at any time.
    """

    def __init__(self, cache_dir: Path) -> None:
        """Read the memory; a damaged one counts as empty."""
        self._file = cache_dir / _MEMORY_FILE
        self._known = self._remembered()

    def of(self, parts: Iterable[ModelPart]) -> str:
        """One fingerprint of all `parts`, in their order: 64 hex digits. Paths and names are not in it.

        Raises:
            ModelError: A file is missing or unreadable.
        """
        new: dict[str, list[Any]] = {}
        try:
            facts = [
                {
                    "role": part.role,
                    "configs": [_meaning(json.loads(path.read_bytes())) for path in part.configs],
                    "contents": [self._content(path, new) for path in part.contents],
                }
                for part in parts
            ]
        except (OSError, ValueError) as err:
            fix = "download the model again, or set model.base to a complete diffusers folder"
            where = str(getattr(err, "filename", None) or "its configuration")
            raise ModelError(f"a file of the base model is unreadable: {err}", where=where, fix=fix) from err
        self._remember(new)
        return canonical_hash(facts)

    def _content(self, path: Path, new: dict[str, list[Any]]) -> str:
        real = path.resolve()
        if real.parent.name == "blobs" and _BLOB_NAME.fullmatch(real.name):
            return real.name  # the Hub's cache names large files by their sha256
        stat = real.stat()
        seen = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
        known = self._known.get(str(real))
        if known is not None and known[:-1] == seen:
            return known[-1]
        started_ns = time.time_ns()
        with real.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        if started_ns - max(stat.st_mtime_ns, stat.st_ctime_ns) > _RACY_NS:
            new[str(real)] = [*seen, content]
        return content

    def _remembered(self) -> dict[str, list[Any]]:
        try:
            known = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(known, dict):
            return {}
        lists = {
            path: entry for path, entry in cast("dict[str, Any]", known).items() if isinstance(entry, list)
        }
        return {path: entry for path, entry in cast("dict[str, list[Any]]", lists).items() if len(entry) == 5}

    def _remember(self, new: dict[str, list[Any]]) -> None:
        if not new:
            return
        self._known = {**self._remembered(), **new}
        with suppress(OSError):  # it only saves time; what must be written complains for itself
            write_text(self._file, json.dumps(self._known, indent=1, sort_keys=True))


def _meaning(config: Any) -> Any:
    """The configuration without what only says where it came from."""
    if isinstance(config, list):
        return [_meaning(item) for item in cast("list[Any]", config)]
    if isinstance(config, float) and not math.isfinite(config):
        return str(config)  # solvers' configurations have them, JSON has not
    if not isinstance(config, dict):
        return config
    return {
        name: _meaning(value)
        for name, value in cast("dict[str, Any]", config).items()
        if name == "_class_name" or not (name.startswith("_") or name in _MEANINGLESS)
    }
