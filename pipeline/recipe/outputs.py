"""The mirror of a recipe's output folder, and the files that stages and commands need."""

from __future__ import annotations

import json
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from pipeline.recipe.isolation import require_isolation
from pipeline.storage.mirror import Log, Mirror, discard

if TYPE_CHECKING:
    from pipeline.recipe.schema import Recipe

MERGED_REJECTIONS = "tables/rejected.parquet"
_STAGE_REJECTIONS = "tables/rejected/*.parquet"

PUBLISHED_FILES = ("lora/*", "runs/exported_step.json")
"""Files of the published LoRA, and the record that it is that of an earlier step."""

_WITH_DATASET_PAGE = ("validated_dataset", "aspect_buckets")

COMMAND_FILES = (
    *("tables/*", "reports/*.json", "lora/*", "fingerprints.json"),
    *("runs/exported_step.json", "runs/*/*.json", "reports/pictures/*/sheet.jpg"),
)
"""Files that commands read. Checkpoints and LoRA files of a run are pulled when one is chosen."""

COMMAND_RESULTS = (
    *("tables/*", f"!{MERGED_REJECTIONS}", "reports/*", "fingerprints.json", "runs/*/exported_step/*"),
)
"""Files that commands may change, except the published LoRA; see `trained_lora.publishing`."""


def mirror_of(recipe: Recipe, log: Log = discard) -> Mirror:
    """Return the mirror of the recipe's output folder, which checks path isolation before its first use."""
    return Mirror(
        recipe.output_address,
        recipe.output_dir,
        log=log,
        before_use=partial(_require_isolation, recipe),  # pyright: ignore[reportArgumentType] - a frozen model is hashable
    )


def stage_files(asset: str) -> tuple[str, ...]:
    """Return patterns of the files that a stage or its checks read or write, except those of its runs."""
    page = ("reports/dataset/*",) if asset in _WITH_DATASET_PAGE else ()
    lora = PUBLISHED_FILES if asset == "trained_lora" else ()
    return ("tables/*", "reports/*.json", f"reports/{asset}/*", *page, *lora, "fingerprints.json")


def pull_stage(mirror: Mirror, asset: str) -> None:
    """Pull the files of a stage, and of trained_lora also those of the published run that its checks read.

    Raises:
        StoreError: The service does not answer.
    """
    mirror.pull(*stage_files(asset))
    if asset == "trained_lora" and (run := _published_run(mirror)):
        top = f"runs/{run}"
        mirror.pull(f"{top}/*.json", f"{top}/logs/*")


def push_stage(mirror: Mirror, asset: str) -> None:
    """Push the files of a stage, except the published LoRA, which is pushed by the holder of its lease.

    Raises:
        StoreError: The service does not answer.
    """
    push_outputs(mirror, *stage_files(asset), *(f"!{pattern}" for pattern in PUBLISHED_FILES))


def push_outputs(mirror: Mirror, *patterns: str) -> None:
    """Push files, and rebuild the merged table of rejected samples at the address.

    Each stage has its own table of rejected samples. The merged one is rebuilt until no other machine has
    replaced a stage's table in the meantime, so the last writer includes every row.

    Raises:
        StoreError: The service does not answer.
    """
    if not mirror.is_remote:
        return
    from pipeline.storage.tables import (
        Tables,  # imports Polars, which commands with local outputs may not need
    )

    mirror.push(*patterns, f"!{MERGED_REJECTIONS}")
    tables = Tables(mirror.folder)
    is_merged = not mirror.pull(_STAGE_REJECTIONS)
    while True:
        if not is_merged:
            tables.merge_rejected()
        if tables.path("rejected").is_file():
            mirror.push(MERGED_REJECTIONS)
        is_merged = not mirror.pull(_STAGE_REJECTIONS)
        if is_merged:
            return


def _published_run(mirror: Mirror) -> str | None:
    try:
        record = json.loads((mirror.folder / "lora" / "provenance.json").read_text(encoding="utf-8"))
        return str(record["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


# The check walks the datasets for links, and one process may open several mirrors of a recipe.
@lru_cache(maxsize=8)
def _require_isolation(recipe: Recipe) -> None:
    require_isolation(recipe)
