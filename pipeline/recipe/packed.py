"""Datasets with images inside of files: WebDataset shards (.tar), and Parquet files with a column of images.

Loading a recipe replaces the `path` of such a dataset with the folder or manifest that raw_images unpacks it
to, so every stage reads ordinary files.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pipeline.recipe.datasets import DatasetSettings, side_input_sections
from pipeline.storage.addresses import Address, address

TAR = ".tar"
"""Suffix of WebDataset shards."""

PARQUET = ".parquet"
"""Suffix of files that may have a column of images."""

WILDCARD = "*"
"""Part of a file name that stands for any characters."""

FILES, MANIFEST = "files", "manifest.parquet"
"""Names in the folder of an unpacked dataset: the folder of its files, and the rows of Parquet shards."""


def unpack_into(dataset: dict[str, Any], scratch: Path) -> Address | None:
    """Set a dataset's `path` to the place where its images are unpacked, and return its former path.

    `dataset` has the values of a recipe file with absolute paths. None for a dataset of ordinary files, which
    is not changed.
    """
    packed = address(dataset["path"])
    suffix, image_column = packed.suffix.lower(), dataset.pop("image_column", None)
    if suffix != TAR and image_column is None:
        return None

    # Recipes that read the same columns of the same shards share the unpacked files.
    sections = [section for _, section in side_input_sections(dataset)]
    columns = [image_column, *(section["column"] for section in sections if section.get("column"))]
    identity = repr((str(packed), columns if suffix != TAR else TAR))
    folder = (
        scratch / "unpacked" / hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    )
    if suffix == TAR:
        dataset["path"] = str(folder / FILES)
    else:
        dataset |= {
            "path": str(folder / MANIFEST),
            "images": str(folder / FILES),
            "path_column": image_column,
        }
    return packed


def names_shards(address: Address) -> bool:
    """Return whether an address names shards by itself: tar archives, or several files.

    One Parquet file may be a manifest as well.
    """
    suffix = address.suffix.lower()
    return suffix == TAR or (suffix == PARQUET and WILDCARD in address.name)


def unpacked_folder(settings: DatasetSettings) -> Path:
    """Return the folder to which a dataset of a loaded recipe is unpacked."""
    return Path(str(settings.path)).parent
