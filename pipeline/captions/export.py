"""Captions as text files for other tools."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from pipeline.errors import DatasetError, PathIsolationError
from pipeline.storage.atomic import write_text
from pipeline.storage.tables import Tables

if TYPE_CHECKING:
    from pipeline.recipe import Recipe


def export_captions(recipe: Recipe, folder: Path) -> int:
    """Write the captions of validated_dataset as text files below `<folder>/<dataset>/`; return their number.

    A file has the path of its image with the suffix .txt, as other trainers expect it. A caption has the
    trigger word and all else that the recipe adds to it.

    Raises:
        DatasetError: Two images would have one file.
        PathIsolationError: The folder is in a dataset, or contains one.
        TableError: The dataset is not validated yet.
    """
    real = Path(os.path.realpath(folder))
    for dataset in recipe.datasets:
        root = Path(os.path.realpath(str(dataset.root)))
        if real.is_relative_to(root) or root.is_relative_to(real):
            raise PathIsolationError(
                f"the folder of the exported captions must be apart from the dataset {dataset.name}",
                where=f"{folder}\n{dataset.root}",
                fix="choose another folder, and copy the files yourself",
            )
    rows = Tables(recipe.output_dir).read("validated_dataset", ("sample_id", "caption"))
    captions: dict[PurePosixPath, str] = {}
    for sample_id, caption in rows.iter_rows():
        file = PurePosixPath(sample_id).with_suffix(".txt")
        if captions.setdefault(file, caption) != caption:
            raise DatasetError(
                f"two images with different captions would have one file {file}, such as {sample_id}",
                where=str(folder),
                fix="rename one of the images, so that the names differ in more than the suffix",
            )
    for file, caption in captions.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        write_text(folder / file, f"{caption}\n")
    return len(captions)
