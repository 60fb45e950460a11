"""Encodings that somebody else than a stage wrote, at an address that contains the hash of its file."""

from __future__ import annotations

import hashlib
import json

from pipeline.encoding.shared_encoding import SharedEncoding


def forged(encoding: SharedEncoding, name: str, content: bytes) -> SharedEncoding:
    """Return a copy of the encoding with another content of the file, and with hashes that are right."""
    files = {file.name: encoding.read(file.name) for file in encoding.files()} | {name: content}
    if name != "encoding.json":
        settings = json.loads(files["encoding.json"])
        settings["jobs_sha256"][int(name[5:10])] = hashlib.sha256(content).hexdigest()
        files["encoding.json"] = json.dumps(settings).encode()
    digest = hashlib.sha256(files["encoding.json"]).hexdigest()[:32]
    copy = SharedEncoding(encoding.address.parent / f"forged-{digest}")
    for each, data in files.items():
        copy.put(each, data)
    return copy
