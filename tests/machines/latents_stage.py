"""The stage vae_latents of a project with tiny images and a cache in S3, each time in a new process.

    python -m tests.machines.latents_stage <folder> <cache>

runs the stage on the tables in <folder> and prints its report, with the peak memory of the process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from PIL import Image

from bench.growth.once import peak_bytes
from bench.workload import Project, tiny_files
from pipeline.cache.entry_format import serialise
from pipeline.cache.recipe_entries import STATS, RecipeEntries
from pipeline.cache.store import Store
from pipeline.storage.addresses import Url
from pipeline.storage.tables import columns_in
from tests.machines.filling import fill


@dataclass(frozen=True)
class LatentsStage:
    """A project whose stages before vae_latents have run.

    Attributes:
        folder: Folder of the project and its images.
        base: Folder of the tiny base model.
        cache: Address of the cache.
    """

    folder: Path
    base: Path
    cache: str

    @property
    def project(self) -> Project:
        project = Project.at(self.folder / "project", self.folder / "photos", base=self.base, resolution=64)
        return Project(project.recipe.model_copy(update={"cache_dir": Url(self.cache)}))

    def prepare(self, count: int) -> None:
        """Write images, and run the earlier stages."""
        tiny_files(self.folder / "photos", count)
        self.plan()

    def add_image(self, number: int) -> None:
        """Add an image that has no entry."""
        path = self.folder / f"photos/new{number}.png"
        seed = [number, *self.folder.name.encode()]
        pixels = np.random.default_rng(seed).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
        path.with_suffix(".txt").write_text("new\n", encoding="utf-8")
        self.plan()

    def plan(self) -> None:
        """Run the stages before vae_latents."""
        self.project.scan()
        self.project.validate()
        self.project.buckets()

    def fill_cache(self, gateway_url: str) -> None:
        """Write the entries of all images, and the table of a job that has verified them."""
        project = self.project
        entries = RecipeEntries(project.recipe)
        requests = entries.latent_requests(project.tables.read("aspect_buckets"))
        specs = {spec.key: spec for spec in map(entries.latent_spec, requests.iter_rows(named=True))}

        def content(key: str) -> bytes:
            spec = specs[key]
            return serialise(
                spec, {name: np.zeros(each.shape, "<f2") for name, each in spec.tensors.items()}, {}
            )

        fill(gateway_url, self.cache.removeprefix("s3://"), list(specs), content)
        stats = Store(Url(self.cache)).stats("latents", requests["key"])
        table = requests.hstack(pl.DataFrame(stats, schema=STATS, orient="row"))
        table = table.with_columns(tile_px=pl.lit(None, pl.Int32))
        project.tables.write("vae_latents", table.select(*columns_in("vae_latents", table)))

    def run(self, environment: dict[str, str]) -> dict[str, Any]:
        """Run the stage in a new process, and return its report with `peak_bytes`."""
        command = [sys.executable, "-m", "tests.machines.latents_stage"]
        command += [str(self.folder), str(self.base), self.cache]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run the stage of the project that the command line names."""
    folder, base, cache = sys.argv[1:]
    report = LatentsStage(Path(folder), Path(base), cache).project.latents().report
    sys.stdout.write(json.dumps({**report, "peak_bytes": peak_bytes()}))


if __name__ == "__main__":
    main()
