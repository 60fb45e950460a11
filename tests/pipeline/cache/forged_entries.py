"""Entries as somebody else who may write a shared cache could have written them: with a valid checksum."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pipeline.cache.store import DATA_START


def with_metadata(raw: bytes, **changes: Any) -> bytes:
    """Return an entry's file with other metadata and their checksum; the value `...` removes a name."""
    header = json.loads(raw[8:DATA_START])
    facts = json.loads(header["__metadata__"]["latentline"]) | changes
    facts = {name: value for name, value in facts.items() if value is not ... and name != "checksum"}
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    facts["checksum"] = hashlib.sha256(canonical.encode() + raw[DATA_START:]).hexdigest()
    header["__metadata__"]["latentline"] = json.dumps(facts)
    return with_header(header) + raw[DATA_START:]


def with_header(header: object) -> bytes:
    """Return the first bytes of an entry with any JSON as its header."""
    text = json.dumps(header).encode().ljust(DATA_START - 8)
    assert len(text) == DATA_START - 8
    return len(text).to_bytes(8, "little") + text


def forge(path: Path, **changes: Any) -> None:
    """Replace the metadata of an entry; see `with_metadata`."""
    path.write_bytes(with_metadata(path.read_bytes(), **changes))
