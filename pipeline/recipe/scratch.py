"""Working copies of output folders at an address, in a local scratch folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pipeline.recipe.deployment import DEFAULT_SCRATCH, load_deployment
from pipeline.storage.addresses import Address, Url, url_parts


def working_copy(name: str, output: Address, root: Path) -> Path:
    """Return the local folder that jobs write to: `output` itself, or its working copy if it is an address.

    Two recipes, and two addresses, never share a working copy. A scratch folder may be deleted between jobs.

    Args:
        name: Name of the recipe.
        output: The recipe's output_dir, a path or an address.
        root: Project root.

    Raises:
        DeploymentError: The deployment file is invalid.
    """
    if not isinstance(output, Url):
        return output
    return scratch_folder(root) / f"{name}-{address_hash(output)[:8]}"


def scratch_folder(root: Path) -> Path:
    """Return the folder of all working copies: `scratch` of the deployment file, or the default below `root`.

    Raises:
        DeploymentError: The deployment file is invalid.
    """
    deployment = load_deployment()
    return root / DEFAULT_SCRATCH if deployment.source is None else deployment.scratch


def address_hash(url: Url) -> str:
    """Return a hash of an address in hex; a slash at its end does not matter."""
    identity = "/".join([url.protocol.lower(), *url_parts(url)]) if len(url.links) == 1 else url
    return hashlib.sha256(identity.encode("utf-8")).hexdigest()
