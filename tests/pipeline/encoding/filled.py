"""A cache on a small disk of its own that really fills up. Run in a mount namespace: FOLDER MODEL.

Another program takes the disk's space after the estimate and before the first entry, and later gives it
back. What was seen is printed as JSON.
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
from tests.conftest import LaunchHere
from tests.pipeline.cached_job import recipe_of

DISK = "size=80m"
ROOM_BYTES = 2 * 4096
"""For two of the test's entries: a file takes whole pages of such a disk."""


class Rivalled(LaunchHere):
    """The first encoder finds the disk taken by another program."""

    def __init__(self, ballast: Path) -> None:
        super().__init__()
        self.ballast = ballast

    def __call__(self, module: str, order: Path, meanwhile: Meanwhile | None = None) -> None:
        if meanwhile is not None:
            meanwhile()  # it finds room
        if not self.modules:
            with self.ballast.open("wb") as file:
                free = shutil.disk_usage(self.ballast.parent).free
                os.posix_fallocate(file.fileno(), 0, free - ROOM_BYTES)
        super().__call__(module, order)


def attempt(
    recipe: Recipe, launch: Rivalled, stage: Callable[..., StageResult] = cache_latents
) -> dict[str, Any]:
    """One run of a cache stage: its error or its counters, the latents there are, how many encoders ran."""
    tables, quiet = Tables(recipe.output_dir), {"log": lambda _: None}
    valid = validate(recipe, scan(recipe, tables, **quiet).table, tables, **quiet).table
    rows = valid if stage is cache_text else assign_buckets(recipe, valid, **quiet).table
    seen: dict[str, Any] = {"error": ""}
    try:
        seen["report"] = stage(recipe, rows, tables, launch=launch, **quiet).report
    except StoreError as err:
        seen["error"] = str(err)
    files = [path for path in (recipe.cache_dir / "latents").rglob("*") if path.is_file()]
    return {
        **seen,
        "files": {path.name: path.read_bytes().hex() for path in files},
        "launched": len(launch.modules),
    }


def main(folder: Path, model: str) -> None:
    """Filled meanwhile, full from the start, and with room again."""
    recipe = recipe_of(folder, model)
    recipe.cache_dir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", str(recipe.cache_dir)], check=True)
    launch = Rivalled(recipe.cache_dir / "ballast")
    seen = {"filled": attempt(recipe, launch), "full": attempt(recipe, launch)}
    seen["text"] = attempt(recipe, launch, cache_text)
    launch.ballast.unlink()
    seen["room"] = attempt(recipe, launch)
    sys.stdout.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
