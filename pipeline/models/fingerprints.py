"""Fingerprints of base models: hashes of configurations and weights, independent of names and paths."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pipeline.errors import ModelError
from pipeline.log import Log, discard
from pipeline.models.diffusers_folder import read_bounded, stored_dtype
from pipeline.reporting.progress import progress
from pipeline.storage.checked_json import read_checked, write_checked

_MEMORY_FILE = "fingerprints.json"

RACY_NS = 2_000_000_000
"""Minimum age of a file for its hash to be remembered. A younger file may change again within one tick of its
time stamp, which would not show it."""

_MEGABYTE = 1_000_000

# Number of bytes hashed at a time, as in `hashlib.file_digest`.
_READ_BYTES = 2**18

_SHA256 = re.compile(r"[0-9a-f]{64}")

# Configuration keys that only record the origin of a file. So do all keys that start with an underscore,
# except `_class_name`.
_IGNORED_KEYS = {"name_or_path", "tokenizer_file", "special_tokens_map_file", "transformers_version"}


@dataclass(frozen=True)
class ModelPart:
    """Files of the base model that decide an artifact's bytes.

    Attributes:
        role: Name of the part in its family, such as "vae"; not a path.
        configs: JSON files that are compared by value, without names, paths and package versions.
        contents: Files that are compared by their bytes.
    """

    role: str
    configs: tuple[Path, ...]
    contents: tuple[Path, ...]


def canonical_text(value: Any) -> str:
    """Return a JSON-serialisable value as ASCII, independent of the order of keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def canonical_hash(value: Any) -> str:
    """Return the sha256 of a value's `canonical_text`, in hex."""
    return hashlib.sha256(canonical_text(value).encode("ascii")).hexdigest()


class Fingerprints:
    """Fingerprints of model files; a file is hashed again only if its stat changes.

    Hashes are remembered in `cache_dir/fingerprints.json`, which may be deleted at any time.
    """

    def __init__(self, cache_dir: Path, *, log: Log = discard) -> None:
        """Read the memory, which is empty if missing or damaged. `log` receives damage and the progress."""
        self._file = cache_dir / _MEMORY_FILE
        self._log = log
        self._num_hashed_bytes = 0
        self._remembered = self._read(log)

    def of(self, parts: Iterable[ModelPart]) -> str:
        """Return one fingerprint of all parts, in their order: 64 hex digits, independent of paths and names.

        Raises:
            ModelError: A file is missing or unreadable.
        """
        new_entries: dict[str, list[Any]] = {}
        parts = tuple(parts)
        try:
            hashes = self._content_hashes([path for part in parts for path in part.contents], new_entries)
            facts = [
                {
                    "role": part.role,
                    "configs": [_comparable(_read_config(path, part.contents)) for path in part.configs],
                    "contents": [hashes[path] for path in part.contents],
                }
                for part in parts
            ]
        except (OSError, ValueError, RecursionError) as err:
            fix = "download the model again, or set model.base to a complete diffusers folder"
            where = str(getattr(err, "filename", None) or "configuration of the base model")
            raise ModelError(f"a file of the base model is unreadable: {err}", where=where, fix=fix) from err

        self._remember(new_entries)
        return canonical_hash(facts)

    def _content_hashes(self, paths: Iterable[Path], new_entries: dict[str, list[Any]]) -> dict[Path, str]:
        known = {path: self._known_hash(path.resolve()) for path in paths}
        unknown = [path for path, content_hash in known.items() if content_hash is None]
        hashes = {path: content_hash for path, content_hash in known.items() if content_hash is not None}
        if not unknown:
            return hashes

        num_bytes = sum(path.stat().st_size for path in unknown)
        self._num_hashed_bytes = 0
        with progress(
            lambda: self._num_hashed_bytes // _MEGABYTE,
            num_bytes // _MEGABYTE,
            "model weights hashed",
            log=self._log,
            measure="MB",
        ):
            return hashes | {path: self._hash(path.resolve(), new_entries) for path in unknown}

    def _known_hash(self, real: Path) -> str | None:
        if real.parent.name == "blobs" and _SHA256.fullmatch(real.name):
            return real.name  # the Hub's cache names large files by their sha256
        entry = self._remembered.get(str(real))
        return entry[-1] if entry is not None and entry[:-1] == _stat_numbers(real.stat()) else None

    def _hash(self, real: Path, new_entries: dict[str, list[Any]]) -> str:
        # Before reading: if the file changes meanwhile, its hash is remembered for the old stat only.
        stat = real.stat()
        started_ns = time.time_ns()
        digest, buffer = hashlib.sha256(), bytearray(_READ_BYTES)
        with real.open("rb", buffering=0) as file:
            while num_read := file.readinto(buffer):
                digest.update(memoryview(buffer)[:num_read])
                self._num_hashed_bytes += num_read

        if started_ns - max(stat.st_mtime_ns, stat.st_ctime_ns) > RACY_NS:
            new_entries[str(real)] = [*_stat_numbers(stat), digest.hexdigest()]
        return digest.hexdigest()

    def _read(self, log: Log = discard) -> dict[str, list[Any]]:
        """Return the remembered entries, path to [size, mtime, ctime, inode, hash]."""
        try:
            items = read_checked(self._file).items()
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as err:
            log(f"{self._file} cannot be read ({err}), so the base model's weights are hashed again")
            return {}
        lists = {path: cast("list[Any]", entry) for path, entry in items if isinstance(entry, list)}
        # Whoever may write a shared cache may have written any JSON.
        return {path: entry for path, entry in lists.items() if len(entry) == 5 and _is_hash(entry[-1])}

    def _remember(self, new_entries: dict[str, list[Any]]) -> None:
        if not new_entries:
            return
        # Another process may have added entries meanwhile.
        self._remembered = {**self._read(), **new_entries}
        with suppress(OSError):  # the memory only saves time
            write_checked(self._file, dict(sorted(self._remembered.items())))


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _stat_numbers(stat: os.stat_result) -> list[int]:
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _read_config(path: Path, weights: tuple[Path, ...]) -> Any:
    config: Any = json.loads(read_bounded(path))

    # diffusers loads a text encoder in the dtype that its configuration states, Latentline in the recipe's
    # dtype. float32 represents every stored value exactly, so a configuration that states it gives the same
    # embeddings as one that states the stored dtype, which save_pretrained writes.
    if isinstance(config, dict) and cast("dict[str, Any]", config).get("dtype") == "float32":
        return {**config, "dtype": stored_dtype(weights) or "float32"}
    return config


def _comparable(config: Any) -> Any:
    if isinstance(config, list):
        return [_comparable(item) for item in cast("list[Any]", config)]
    if isinstance(config, float) and not math.isfinite(config):
        return str(config)  # allowed in configurations of solvers, but not in canonical JSON
    if not isinstance(config, dict):
        return config
    return {
        name: _comparable(value)
        for name, value in cast("dict[str, Any]", config).items()
        if name == "_class_name" or not (name.startswith("_") or name in _IGNORED_KEYS)
    }
