"""Working copies of output folders at an address, in a local scratch folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pipeline.storage.addresses import Address, Url, url_parts

DEFAULT_SCRATCH = ".cache/scratch"
"""Scratch folder, relative to the project root."""


def working_copy(name: str, output: Address, root: Path) -> Path:
    """Return the local folder that jobs write to: `output` itself, or its working copy if it is an address.

    Two recipes, and two addresses, never share a working copy. A scratch folder may be deleted between jobs.

    Args:
        name: Name of the recipe.
        output: The recipe's output_dir, a path or an address.
        root: Project root.
    """
    if not isinstance(output, Url):
        return output
    return scratch_folder(root) / f"{name}-{address_hash(output)[:8]}"


def scratch_folder(root: Path) -> Path:
    """Return the folder of all working copies."""
    return root / DEFAULT_SCRATCH


def address_hash(url: Url) -> str:
    """Return a hash of an address in hex; a slash at its end does not matter."""
    identity = "/".join([url.protocol.lower(), *url_parts(url)]) if len(url.links) == 1 else url
    return hashlib.sha256(identity.encode("utf-8")).hexdigest()
