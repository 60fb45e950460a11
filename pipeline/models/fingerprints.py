"""Fingerprints of base models: hashes of configurations and weights, independent of names and paths."""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pipeline.errors import ModelError
from pipeline.storage.atomic import write_text

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


def canonical_text(value: Any) -> str:
    """A JSON-serialisable value as ASCII; the order of keys does not matter."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def canonical_hash(value: Any) -> str:
    """The sha256 of a value's `canonical_text`, in hex."""
    return hashlib.sha256(canonical_text(value).encode("ascii")).hexdigest()


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
