"""A dataset with a trained run, whose files are written without a training."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, PngImagePlugin

from pipeline.page.live import Recipes
from pipeline.storage.atomic import write_text
from pipeline.trained_lora.previews import PROMPT_KEY, preview_file
from pipeline.trained_lora.run_folder import RunLayout, run_folder
from tests.pipeline.dataset_folder import Folder


class Page:
    """A folder with two images, and functions that add rejected images, runs and previews to it."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.out = folder.output_dir
        folder.add("rose.png", folder.picture(1, 24, 40), caption="a red rose")
        folder.add("deep/tulip.png", folder.picture(2, 40, 24), caption="a yellow tulip")

    def ingest(self) -> None:
        """Run the stages up to aspect_buckets, and write the dataset page, which has the thumbnails."""
        from pipeline.validated_dataset.dataset_page import write_dataset_page

        self.folder.scan()
        self.folder.validate()
        placed = self.folder.assign()
        rejected = self.folder.tables.read_rejected()
        table = self.folder.tables.read("validated_dataset")
        write_dataset_page(self.folder.recipe, table, rejected, placed=placed, log=self.folder.log.append)

    def add_run(
        self, name: str, *, began_s: int, steps: int = 4, prompt: str = "a rose", **facts: Any
    ) -> RunLayout:
        """Write a run that has done all its steps, with a preview before and after them."""
        layout = RunLayout(run_folder(self.out, name))
        write_text(layout.facts, json.dumps(facts))
        os.utime(layout.facts, (began_s, began_s))
        write_text(layout.folder / "order.json", json.dumps({"recipe": {"training": {"steps": steps}}}))
        lines = [
            {"step": step, "loss": 0.5 / (step + 1), "learning_rate": 1e-3, "seconds": 0.5, "samples": 2}
            for step in range(steps)
        ]
        write_text(layout.metrics, "".join(json.dumps(line) + "\n" for line in lines))
        for step in (0, steps):
            add_preview(layout, step, prompt)
        return layout

    def publish(self, run: str, step: int) -> None:
        """Write the record that the LoRA of a step is in `lora/`."""
        write_text(self.out / "lora" / "provenance.json", json.dumps({"run": run, "step": step}))


def add_preview(layout: RunLayout, step: int, prompt: str, number: int = 0) -> Path:
    """Write a preview of random pixels, as the worker does."""
    pixels = np.random.default_rng(step).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    info = PngImagePlugin.PngInfo()
    info.add_itxt(PROMPT_KEY, prompt)
    file = preview_file(layout.previews, step, number)
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file, pnginfo=info)
    return file


def add_drawing(page: Page, name: str, prompt: str) -> Path:
    """Write a picture as `latentline sample` does, to its folder in `reports/pictures`."""
    info = PngImagePlugin.PngInfo()
    info.add_itxt(PROMPT_KEY, prompt)
    file = page.out / "reports" / "pictures" / name / "step-00000004-strength-0.5-prompt-01.png"
    file.parent.mkdir(parents=True)
    Image.new("RGB", (64, 64), "green").save(file, pnginfo=info)
    return file


def recipes_of(page: Page, folder: Path) -> Recipes:
    """Write the recipe of the dataset to `folder/configs`, and return the recipes of that folder."""
    file = folder / "configs" / "small.yaml"
    file.parent.mkdir()
    values = {
        "datasets": [{"name": "d", "path": str(page.folder.root)}],
        "cache_dir": str(page.out / "cache"),
        "output_dir": str(page.out),
        "model": {"base": "no model"},
        "buckets": {"resolution": 64, "step": 8},
    }
    file.write_text(json.dumps(values), "utf-8")
    return Recipes([], file.parent)
