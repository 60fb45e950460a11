"""`reports/index.html`: the page of a recipe as one file, with its pictures inside and without scripts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from pipeline.outputs.folder import outputs_of
from pipeline.page.contents import RESULT_PICTURES, Limits, result_contents, run_rows, training_contents
from pipeline.page.dataset import read_dataset, reasons
from pipeline.page.pictures import Embedded
from pipeline.page.render import render, template_text
from pipeline.page.runs import read_runs
from pipeline.reporting.reports import report_path
from pipeline.storage.atomic import write_text

if TYPE_CHECKING:
    from pipeline.log import Log
    from pipeline.recipe import Recipe

MAX_IMAGES = 48
"""Maximum number of kept images on the page, so that it stays below a few MB."""

MAX_PER_REASON = 6
"""Maximum number of rejected images per reason."""

SECTIONS = {
    "stages": "Stages",
    "training": "Training",
    "previews": "Previews",
    "dataset": "Dataset",
    "evaluation": "Evaluation",
    "sweep": "Sweep",
    "diagnosis": "Diagnosis",
    "influence": "Influence of images",
    "runs": "Runs",
    "lora": "LoRA",
}
"""Headings by the name of their template; sections of optional results appear if they have a report."""

_SHOWN_SUFFIXES = (".json", ".jsonl", ".md", ".png", ".jpg")


def page_path(output_dir: Path) -> Path:
    """Return `output_dir/reports/index.html`."""
    return report_path(output_dir, "index").with_suffix(".html")


def refresh_page(recipe: Recipe, log: Log) -> Path:
    """Write the page as `write_page` does; of outputs at an address from the files there, and upload it.

    Raises:
        StoreError: The service does not answer.
    """
    outputs = outputs_of(recipe, log)
    infos = {name: info for top in ("reports", "runs", "lora") for name, info in outputs.infos(top).items()}
    # The states of checkpoints and the LoRA files are large, and the page does not contain them.
    outputs.fetch_listed({name: info for name, info in infos.items() if name.endswith(_SHOWN_SUFFIXES)})
    path = write_page(recipe)
    outputs.upload(path.relative_to(recipe.output_dir).as_posix())
    return path


def write_page(recipe: Recipe) -> Path:
    """Write the page unless it is unchanged, and return its path."""
    picture = Embedded(recipe.output_dir)
    limits = Limits()
    dataset = read_dataset(recipe)
    runs = read_runs(recipe.output_dir)
    results = result_contents(recipe, dataset)
    rejected = dataset.rejected.group_by("reason", maintain_order=True).head(MAX_PER_REASON)
    names = [name for name in SECTIONS if name not in RESULT_PICTURES or name in results["results"]]
    text = render(
        "static.html",
        recipe=recipe,
        picture=picture,
        sections={name: SECTIONS[name] for name in names},
        style=template_text("page.css"),
        kept=list(dataset.shown(dataset.first(MAX_IMAGES))),
        num_kept=_number_kept(dataset.kept, dataset.rejected),
        rejected=list(dataset.shown(rejected)),
        reasons=reasons(dataset.rejected),
        num_rejected=dataset.rejected["sample_id"].n_unique(),
        rows=run_rows(runs, 0, limits.runs),
        num_runs=len(runs),
        **training_contents(recipe, runs, limits),
        **results,
    )
    path = page_path(recipe.output_dir)
    if not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != text:
        write_text(path, text)
    picture.remove_unused()
    return path


def _number_kept(kept: pl.DataFrame, rejected: pl.DataFrame) -> int:
    # Later stages may reject an image that validated_dataset has kept.
    return len(kept.join(rejected, on="sample_id", how="anti"))
