"""`latentline fit-buckets`: fit bucket sizes to a dataset and compare them with the recipe's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import click
import numpy as np
import polars as pl

from pipeline.aspect_buckets.fit import FittedList, SizeConstraints, fitted_lists
from pipeline.aspect_buckets.fit_cost import Dataset, FitQuality, measure_fit, placement_in
from pipeline.cli.conventions import RECIPE_WITH_OUTPUTS, echo, log_to_stderr
from pipeline.cli.json_output import give
from pipeline.errors import BucketError, LatentlineError, counted
from pipeline.images.geometry import Placement, placement_of
from pipeline.images.geometry.sizes import Size
from pipeline.models.size_multiple import local_family
from pipeline.recipe import Recipe, load_recipe
from pipeline.recipe.buckets import LATENT_FACTOR
from pipeline.storage.atomic import write_text
from pipeline.validated_dataset.holdout import times_drawn

NUMBERS = (4, 6, 8, 12, 16, 20, 28, 36, 48)
"""Maximum numbers of sizes that are compared by default."""

DEFAULT_STEP = 16
"""Step of fitted sizes if the base model is not local; suits every family."""

_HEAD = (
    f"{'':22} {'sizes':>5} {'used':>5} {'crop loss':>10} {'worst':>7} {'upscaled':>9} "
    f"{'in full batches':>16} {'re-encode':>9}"
)


@click.command(short_help="Fit bucket sizes to the images of a recipe.")
@click.argument("recipe", type=RECIPE_WITH_OUTPUTS)
@click.option(
    "--write",
    type=click.IntRange(1, 200),
    metavar="K",
    help="Write the best list of at most K sizes to the recipe as buckets.sizes.",
)
@click.option(
    "--step",
    type=click.IntRange(1, 512),
    help="Multiple of all edges, in pixels. By default the base model's, or a finer step of the recipe.",
)
@click.option(
    "--free",
    is_flag=True,
    help="Allow a size without its transposed. By default, 768x1024 comes with 1024x768.",
)
def command(recipe: Recipe, write: int | None, step: int | None, free: bool) -> None:
    """Find the bucket sizes that suit the images of RECIPE best, and compare them with its current ones.

    A longer list of sizes crops less, but leaves more batches incomplete. The command therefore fits lists of
    several lengths and prints one line for each. Only --write changes the recipe.

    \b
    sizes            number of sizes in the list
    used             number of sizes that at least one image gets
    crop loss        mean fraction of an image that is cropped away
    worst            largest of these fractions
    upscaled         fraction of images that are enlarged
    in full batches  fraction of an epoch's samples that are in complete batches
    re-encode        number of images that get another size and must be encoded again

    A written list is fixed: new images do not change it, and so do not move other images to another bucket.
    """  # noqa: D301 - click needs the character that \b stands for
    _require_one_resolution(recipe)
    names = [each.name for each in recipe.datasets if recipe.buckets_of(each) == recipe.buckets]
    images, dataset, source = _datasets(recipe, names)
    constraints = SizeConstraints(
        resolution=recipe.buckets.resolution,
        step=step or _default_step(recipe),
        max_aspect_ratio=recipe.buckets.max_aspect_ratio,
        mirrored=not free,
    )
    echo(
        f"{recipe.name}: {counted(len(images), 'image')} from {source}, batches of {dataset.batch_size}, "
        f"budget {constraints.resolution}x{constraints.resolution}, step {constraints.step}"
    )
    if not recipe.buckets.sizes and recipe.buckets.step < constraints.step:
        echo(
            f"the recipe's step is {recipe.buckets.step}, which crops less: sizes in a list are multiples of "
            f"{constraints.step}"
        )
    current = placement_of(recipe.buckets)
    quality = measure_fit(current, dataset)
    lists = [_list_values(current.sizes, quality, 0)]
    echo(_HEAD)
    echo(_line("current recipe", len(current.sizes), quality, 0))

    shown: set[int] = set()
    for number, fit in fitted_lists(dataset, constraints, (write,) if write else NUMBERS).items():
        if len(fit.sizes) in shown:
            continue
        shown.add(len(fit.sizes))
        num_changed = _num_changed(current, fit, images)
        lists.append(_list_values(fit.sizes, fit.quality, num_changed))
        echo(_line(f"fitted, at most {number}", len(fit.sizes), fit.quality, num_changed))
        if write:
            _write(recipe, fit)
            echo(f"wrote {counted(len(fit.sizes), 'size')} as buckets.sizes to {recipe.source}")
    give({"recipe": recipe.name, "images": len(images), "current": lists[0], "fitted": lists[1:]})


def _require_one_resolution(recipe: Recipe) -> None:
    settings = recipe.buckets
    if all(recipe.buckets_of(each) != settings for each in recipe.datasets):
        raise BucketError(
            "all datasets have resolutions of their own, to which buckets.sizes does not apply",
            where=f"{recipe.source}, datasets",
            fix="remove resolution and resolutions from a dataset, or keep the current buckets",
        )
    for key, given in (
        ("resolutions", bool(settings.resolutions)),
        ("upscale", settings.upscale != "allow"),
    ):
        if given:
            raise BucketError(
                f"buckets.{key} is set, but sizes can only be fitted to one resolution that all images use",
                where=f"{recipe.source}, buckets.{key}",
                fix=f"remove buckets.{key}, or keep the current buckets",
            )


def _datasets(recipe: Recipe, names: Sequence[str]) -> tuple[Dataset, Dataset, str]:
    """Return the image sizes of datasets, once each and as often as an epoch draws them, and their source."""
    from pipeline.raw_images.stage import scan
    from pipeline.storage.tables import Tables

    tables = Tables(recipe.output_dir, log=log_to_stderr)
    source = "validated_dataset"
    table = tables.read_previous("validated_dataset")
    if table is None or table.is_empty():
        source = "a new scan"
        table = scan(recipe, tables, log=log_to_stderr, remember=False).table
        # Near duplicates are unknown before validation.
        table = table.with_columns(duplicate_group="content_hash")
    table = table.filter(pl.col("dataset").is_in(names))
    times = times_drawn(table, recipe.datasets).to_numpy()
    height, width = (table[name].to_numpy().astype(np.int64) for name in ("height", "width"))
    batch_size = recipe.training.batch_size * recipe.accelerate.num_processes
    drawn = Dataset(np.repeat(height, times), np.repeat(width, times), batch_size)
    return Dataset(height, width, batch_size), drawn, source


def _default_step(recipe: Recipe) -> int:
    """Return the base model's size multiple, but at least 8, or the recipe's step if that is smaller."""
    family, own = local_family(recipe), recipe.buckets.step
    if family is None:  # nothing is downloaded
        step = own if LATENT_FACTOR <= own < DEFAULT_STEP else DEFAULT_STEP
        suits = "the recipe's" if step == own else "which suits every family"
        echo(f"{recipe.model.base} is not a local model; using step {step}, {suits}")
        return step

    multiple = family.size_multiple()
    step = multiple * -(-LATENT_FACTOR // multiple)
    return own if own < step and own % multiple == 0 else step


def _list_values(sizes: Sequence[Size], quality: FitQuality, num_changed: int) -> dict[str, Any]:
    return {"sizes": [str(size) for size in sizes], **asdict(quality), "re_encode": num_changed}


def _line(name: str, num_sizes: int, quality: FitQuality, num_changed: int) -> str:
    return (
        f"{name:22} {num_sizes:>5} {quality.num_buckets:>5} {quality.crop_loss:>10.2%} "
        f"{quality.worst_crop_loss:>7.1%} {quality.upscaled:>9.1%} {quality.in_full_batches:>16.1%} "
        f"{num_changed:>9,}"
    )


def _num_changed(current: Placement, fit: FittedList, images: Dataset) -> int:
    # Only random crops need names. They do not decide the bucket, so any names will do.
    names = [""] * len(images) if current.crop == "random" else None
    before = current.assign_many(images.height, images.width, names)
    after = placement_in(fit.sizes).assign_many(images.height, images.width).columns

    # Images that the current recipe rejects have no row in `before`.
    is_same = before.columns.target_height == after.target_height[before.image]
    is_same &= before.columns.target_width == after.target_width[before.image]
    return len(images) - len(np.unique(before.image[is_same]))


def _write(recipe: Recipe, fit: FittedList) -> None:
    """Write the sizes to the recipe's file, which stays as it is if the recipe would become invalid."""
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap, CommentedSeq

    file = Path(recipe.source)
    before = file.read_text(encoding="utf-8")

    # ruamel.yaml's round trip preserves comments and the order of keys.
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 100
    yaml.indent(mapping=2, sequence=4, offset=2)
    document = yaml.load(before)
    sizes = CommentedSeq(str(size) for size in fit.sizes)
    sizes.fa.set_flow_style()
    document.setdefault("buckets", CommentedMap())["sizes"] = sizes

    text = StringIO()
    yaml.dump(document, text)
    write_text(file, text.getvalue())
    try:
        load_recipe(file)
    except LatentlineError:
        write_text(file, before)
        raise
