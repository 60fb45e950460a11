"""Run cache jobs on a small tmpfs that fills up. Run in a mount namespace.

Usage: `python -m tests.pipeline.encoding.full_cache_disk FOLDER MODEL`. A ballast file takes the free
space after the estimate and before the first entry, and is deleted later. Observations are printed as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.aspect_buckets.stage import assign_buckets
from pipeline.errors import StoreError
from pipeline.processes.launch import Meanwhile
from pipeline.raw_images.stage import scan
from pipeline.recipe import Recipe
from pipeline.reporting.reports import StageResult
from pipeline.storage.tables import Tables
from pipeline.text_embeddings.stage import cache_text
from pipeline.vae_latents.stage import cache_latents
from pipeline.validated_dataset.stage import validate
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.cached_job import recipe_of

DISK = "size=80m"
ROOM_BYTES = 2 * 4096
"""Space for two of the test's entries; tmpfs allocates full pages."""


class DiskFillingLaunch(InProcessLaunch):
    """A launch that fills the disk with a ballast file just before the first encoder starts."""

    def __init__(self, ballast: Path) -> None:
        super().__init__()
        self.ballast = ballast

    def __call__(self, module: str, encoding: Path, meanwhile: Meanwhile | None = None) -> None:
        if meanwhile is not None:
            meanwhile()  # the estimate still sees free space
        if not self.modules:
            with self.ballast.open("wb") as file:
                free = shutil.disk_usage(self.ballast.parent).free
                os.posix_fallocate(file.fileno(), 0, free - ROOM_BYTES)
        super().__call__(module, encoding)


def attempt(
    recipe: Recipe, launch: DiskFillingLaunch, stage: Callable[..., StageResult] = cache_latents
) -> dict[str, Any]:
    """Run a cache stage once; return its error or report, the cached latents and the number of launches."""
    tables, quiet = Tables(recipe.output_dir), {"log": lambda _: None}
    validated = validate(recipe, scan(recipe, tables, **quiet).table, tables, **quiet).table
    rows = validated if stage is cache_text else assign_buckets(recipe, validated, **quiet).table
    observed: dict[str, Any] = {"error": ""}
    try:
        observed["report"] = stage(recipe, rows, tables, launch=launch, **quiet).report
    except StoreError as err:
        observed["error"] = str(err)
    files = [path for path in (recipe.cache_dir / "latents").rglob("*") if path.is_file()]
    return {
        **observed,
        "files": {path.name: path.read_bytes().hex() for path in files},
        "launched": len(launch.modules),
    }


def main(folder: Path, model: str) -> None:
    """Run jobs on a disk that fills up during the job, is full from the start, and has space again."""
    recipe = recipe_of(folder, model)
    recipe.cache_dir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", str(recipe.cache_dir)], check=True)
    launch = DiskFillingLaunch(recipe.cache_dir / "ballast")
    observed = {"filled": attempt(recipe, launch), "full": attempt(recipe, launch)}
    observed["text"] = attempt(recipe, launch, cache_text)
    launch.ballast.unlink()
    observed["room"] = attempt(recipe, launch)
    sys.stdout.write(json.dumps(observed) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
