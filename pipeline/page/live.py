"""The pages that `latentline ui` serves: the sections of the static page, live, paged and searchable."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import polars as pl

from pipeline.errors import LatentlineError, counted
from pipeline.page.actions import DRAW, start_command
from pipeline.page.contents import Limits, drawings, result_contents, run_rows, training_contents
from pipeline.page.dataset import Dataset, read_dataset, reasons
from pipeline.page.pictures import Reduced
from pipeline.page.render import render
from pipeline.page.runs import read_runs
from pipeline.page.sample import address, read_sample, sample_contents, with_pending_captions
from pipeline.page.stages import read_stages
from pipeline.page.static import SECTIONS
from pipeline.raw_images.sources import sources_of
from pipeline.recipe import load_recipe
from pipeline.reporting.pictures import SheetImage, jpeg, readable_thumbnail
from pipeline.validated_dataset.dataset_page import FOLDER, THUMBNAIL_PX, THUMBNAILS, thumbnail_name
from pipeline.validated_dataset.edited_captions import FOLDER as CAPTIONS_FOLDER
from pipeline.validated_dataset.edited_captions import EditedCaptions

if TYPE_CHECKING:
    from pipeline.page.actions import Jobs
    from pipeline.page.runs import Run
    from pipeline.recipe import Recipe

IMAGES_PER_PAGE = 60
RUNS_PER_PAGE = 20

PAGES = {"": "Training", "dataset": "Dataset", "results": "Results", "runs": "Runs", "recipe": "Recipe"}
"""Heading of each page of a recipe by the end of its address."""

_HEADINGS = {**SECTIONS, "job": "Job", "draw": "Draw a prompt", "drawings": "Drawn pictures"}

SERVED_FOLDERS = ("reports", "runs", "lora")
"""Folders of the outputs whose files are served."""

SERVED = {".png": "image/png", ".jpg": "image/jpeg", ".safetensors": "application/octet-stream"}
"""Media type by suffix of the files that are served."""

EDGES = (256, 1600)
"""Edges in pixels of reduced pictures."""

_MAX_THUMBNAIL_BYTES = 20_000


class Recipes:
    """The recipes that are served, by name; each is read again when its file has changed."""

    def __init__(self, files: Sequence[Path], folder: Path | None = None) -> None:
        """Serve these files and, if it is given, all recipes of a folder, also ones that are added later."""
        self._files, self._folder = list(files), folder

    def names(self) -> list[str]:
        """Return the names of all recipes, valid or not."""
        return sorted(self._by_name())

    def get(self, name: str) -> Recipe | None:
        """Return the recipe; None if there is no such recipe.

        Raises:
            LatentlineError: Its file is not valid.
        """
        file = self._by_name().get(name)
        return None if file is None else _loaded(file, file.stat().st_mtime_ns)

    def _by_name(self) -> dict[str, Path]:
        in_folder = self._folder.glob("[!.]*.yaml") if self._folder is not None else ()
        return {file.stem: file for file in (*in_folder, *self._files) if file.is_file()}


@lru_cache(maxsize=256)
def _loaded(file: Path, mtime_ns: int) -> Recipe:
    del mtime_ns  # a changed file is another argument
    return load_recipe(file)


@dataclass(frozen=True)
class Linked:
    """Addresses of pictures that the server reduces when a browser requests them."""

    recipe: Recipe

    def __call__(self, path: Path, edge_px: int) -> str:
        """Return the address of the picture."""
        thumbnails = self.recipe.output_dir / "reports" / FOLDER / THUMBNAILS
        if path.parent == thumbnails and not path.is_file():
            # Only the first images have a thumbnail on disk.
            return f"/{self.recipe.name}/image/{quote(path.stem)}"
        return f"{self.full(path)}&edge={edge_px}" if path.is_file() else ""

    def full(self, path: Path) -> str:
        """Return the address of a file below the outputs."""
        name = quote(path.relative_to(self.recipe.output_dir).as_posix())
        # A picture that was drawn again has another address, so that browsers may keep the old one.
        return f"/{self.recipe.name}/files/{name}?v={path.stat().st_mtime_ns}"


def overview(recipes: Recipes) -> str:
    """Return the page with all recipes."""
    rows: list[dict[str, Any]] = []
    for name in recipes.names():
        try:
            recipe = recipes.get(name)
        except LatentlineError as err:
            rows.append({"name": name, "error": err.what})
            continue
        if recipe is not None:
            runs = read_runs(recipe.output_dir)
            linked = Linked(recipe)
            thumbnail = runs[0].thumbnail if runs else None
            rows.append(
                {
                    "name": name,
                    "run": runs[0] if runs else None,
                    "num_runs": len(runs),
                    "stages": read_stages(recipe.output_dir),
                    "thumbnail": linked(thumbnail.path, 256) if thumbnail else "",
                }
            )
    return render("live/overview.html", rows=rows)


def training_page(recipe: Recipe, jobs: Jobs, **more: Any) -> str:
    """Return the page with the job, stages, training and previews, which refreshes itself."""
    linked = Linked(recipe)
    runs = read_runs(recipe.output_dir)
    values = training_contents(recipe, runs, Limits(preview_steps=24))
    return _page(
        "",
        recipe,
        linked,
        sections=("job", "stages", "training", "previews", "draw", "drawings"),
        drawings=drawings(recipe),
        is_drawing=jobs.is_running(recipe, DRAW),
        drawing_lines=jobs.last_lines(recipe, DRAW),
        is_running=jobs.is_running(recipe),
        lines=jobs.last_lines(recipe),
        command=start_command(recipe),
        changed=_changed_since(recipe, runs[0]) if runs and runs[0].state == "stopped" else [],
        **values,
        **more,
    )


def _changed_since(recipe: Recipe, run: Run) -> list[str]:
    """Return what has changed since the run began: recipe and edited captions. Images are not read."""
    edited = EditedCaptions(recipe.output_dir)
    files = [recipe.output_dir / CAPTIONS_FOLDER / path for path in edited.files.values()]
    num_edited = sum(file.is_file() and file.stat().st_mtime_ns > run.began_ns for file in files)
    changed = ["recipe"] if recipe.source.stat().st_mtime_ns > run.began_ns else []
    return [*changed, counted(num_edited, "edited caption")] if num_edited else changed


def dataset_page(recipe: Recipe, query: Mapping[str, str], **more: Any) -> str:
    """Return one page of kept or rejected images.

    Args:
        recipe: The recipe.
        query: `show` is "rejected" for rejected images, `search` a text in names or captions, `reason` a
            reason of rejected images, `page` the number of the page.
        more: Further values of the template.
    """
    dataset = cached_dataset(recipe)
    is_rejected = query.get("show") == "rejected"
    rows = dataset.rejected if is_rejected else dataset.kept
    if text := query.get("search", "").strip():
        columns = ("sample_id", "detail") if is_rejected else ("sample_id", "caption", "more_captions")
        found = [pl.col(name).str.to_lowercase().str.contains(text.lower(), literal=True) for name in columns]
        rows = rows.filter(pl.any_horizontal(found))
    if is_rejected and query.get("reason"):
        rows = rows.filter(pl.col("reason") == query["reason"])
    paging = _paging(query, len(rows), IMAGES_PER_PAGE)
    shown = rows.slice(paging["start"], IMAGES_PER_PAGE)
    return _page(
        "dataset",
        recipe,
        Linked(recipe),
        images=list(with_pending_captions(recipe, dataset.shown(shown))),
        is_rejected=is_rejected,
        query=query,
        paging=paging,
        reasons=reasons(dataset.rejected),
        num_kept=len(dataset.kept),
        num_rejected=len(dataset.rejected),
        **more,
    )


def sample_page(recipe: Recipe, sample_id: str, **more: Any) -> str | None:
    """Return the page of one image, whose captions can be edited; None if no stage has seen it."""
    row = read_sample(recipe, sample_id)
    if row is None:
        return None
    contents = sample_contents(recipe, row, cached_dataset(recipe))
    return _page("dataset", recipe, Linked(recipe), template="sample", **contents, **more)


def recipe_page(recipe: Recipe, **more: Any) -> str:
    """Return the page with the text of the recipe."""
    text = recipe.source.read_text(encoding="utf-8", errors="replace")
    return _page("recipe", recipe, Linked(recipe), template="recipe_file", text=text, **more)


def results_page(recipe: Recipe, **more: Any) -> str:
    """Return the page with evaluation, sweep, diagnosis, influence and the LoRA."""
    results = result_contents(recipe, cached_dataset(recipe))
    sections = ("lora", *results["results"])
    return _page("results", recipe, Linked(recipe), sections=sections, **results, **more)


def runs_page(recipe: Recipe, query: Mapping[str, str], **more: Any) -> str:
    """Return one page of runs."""
    runs = read_runs(recipe.output_dir)
    paging = _paging(query, len(runs), RUNS_PER_PAGE)
    rows = run_rows(runs, paging["start"], RUNS_PER_PAGE)
    return _page(
        "runs", recipe, Linked(recipe), rows=rows, num_runs=len(runs), paging=paging, query=query, **more
    )


def _page(
    name: str,
    recipe: Recipe,
    linked: Linked,
    *,
    template: str = "",
    sections: Sequence[str] = (),
    **values: Any,
) -> str:
    return render(
        f"live/{template or name or 'training'}.html",
        **{
            "name": name,
            "pages": PAGES,
            "recipe": recipe,
            "picture": linked,
            "full": linked.full,
            "lazy": ' loading="lazy"',
            "sections": {each: _HEADINGS[each] for each in sections},
            "sample_address": address,
            **values,
        },
    )


def _paging(query: Mapping[str, str], total: int, size: int) -> dict[str, Any]:
    """Return the start of a page and the addresses of the pages before and after it."""
    last = max(1, math.ceil(total / size))
    text = query.get("page", "")
    number = min(max(1, int(text)) if text.isdecimal() and len(text) < 9 else 1, last)

    def address(page: int) -> str:
        return "?" + urlencode({**{key: value for key, value in query.items() if value}, "page": page})

    return {
        "number": number,
        "last": last,
        "start": (number - 1) * size,
        "total": total,
        "before": address(number - 1) if number > 1 else "",
        "after": address(number + 1) if number < last else "",
    }


def cached_dataset(recipe: Recipe) -> Dataset:
    """Return the images of the recipe, which are read again if their tables or the recipe have changed."""
    tables = recipe.output_dir / "tables"
    files = [tables / "validated_dataset.parquet", tables / "aspect_buckets.parquet", recipe.source]
    files += sorted((tables / "rejected").glob("*.parquet"))
    stamps = tuple((file.name, file.stat().st_mtime_ns) for file in files if file.is_file())
    key = str(recipe.source)
    if key not in _DATASETS or _DATASETS[key][0] != stamps:
        # Few, because each may hold the captions of millions of images.
        if len(_DATASETS) >= _MAX_DATASETS:
            _DATASETS.clear()
        _DATASETS[key] = stamps, read_dataset(recipe)
    return _DATASETS[key][1]


_MAX_DATASETS = 4

_DATASETS: dict[str, tuple[tuple[tuple[str, int], ...], Dataset]] = {}
"""The images of the recipes that were opened last, with the times of their tables."""


def served_file(recipe: Recipe, name: str, edge: str) -> Path | None:
    """Return a file of the recipe's outputs, reduced to `edge` pixels if it is given, or None.

    Only files of `SERVED` in `SERVED_FOLDERS` are served, and no link out of them is followed.
    """
    if "\0" in name or Path(name).suffix not in SERVED:
        return None
    path = (recipe.output_dir / name).resolve()
    folders = [(recipe.output_dir / folder).resolve() for folder in SERVED_FOLDERS]
    if not any(path.is_relative_to(folder) for folder in folders) or not path.is_file():
        return None
    if not edge:
        return path
    if edge not in map(str, EDGES) or SERVED[path.suffix] == "application/octet-stream":
        return None
    return Reduced(recipe.output_dir).file(path, int(edge))


def _drawn(recipe: Recipe, dataset: str, path: str) -> bytes | None:
    source = sources_of(recipe).get(dataset)
    picture = source and readable_thumbnail(SheetImage(source.file(path)), edge_px=THUMBNAIL_PX)
    return jpeg(picture, _MAX_THUMBNAIL_BYTES) if picture else None


def image_thumbnail(recipe: Recipe, stem: str) -> bytes | None:
    """Return the thumbnail of a kept image by the stem of its file name, drawn from the image, or None."""
    hashes = cached_dataset(recipe).kept
    rows = hashes.filter(pl.col("content_hash").str.starts_with(stem[:32])) if stem else hashes.clear()
    for row in rows.head(1).iter_rows(named=True):
        if thumbnail_name(row) == f"{stem}.jpg":
            return _drawn(recipe, row["dataset"], row["path"])
    return None
