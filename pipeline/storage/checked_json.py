"""JSON files with a hash of their values, in which no flipped bit is read as another value."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from pipeline.storage.atomic import write_text

_HASH_KEY = "record_sha256"


def write_checked(path: Path, values: Mapping[str, Any]) -> None:
    """Replace `path` with the values and their hash; see `write_atomically`."""
    # Values that were read before have the hash of that time.
    record = {name: value for name, value in values.items() if name != _HASH_KEY}
    record[_HASH_KEY] = _hash(record)
    write_text(path, json.dumps(record, indent=2) + "\n")


def read_checked(path: Path) -> dict[str, Any]:
    """Return the values of a file of `write_checked`, or of earlier releases, whose files had no hash.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is damaged.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        # A file of another program may hold any JSON.
        if not isinstance(value, dict):
            raise ValueError(f"{path.name} must hold an object, got {type(value).__name__}")
        record = cast("dict[str, Any]", value)
        stored = record.pop(_HASH_KEY, None)
        if stored not in (None, _hash(record)):
            raise ValueError(f"{path.name} changed after it was written")
    except RecursionError as err:
        raise ValueError(f"{path.name} is nested too deeply") from err
    return record


def _hash(record: Mapping[str, Any]) -> str:
    # Of the values as they are read back, in any order.
    values = json.loads(json.dumps(record))
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode("ascii")).hexdigest()
