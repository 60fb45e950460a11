"""`latentline fit-buckets`: bucket sizes that fit the dataset, beside those that the recipe has."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import click
import numpy as np

from pipeline.aspect_buckets.fit import FittedList, Request, fitted_lists
from pipeline.aspect_buckets.fit_cost import Dataset, Trade, placement_in, trade_of
from pipeline.cli.arguments import RECIPE
from pipeline.errors import BucketError, LatentlineError, counted
from pipeline.images.geometry import Placement, placement_of
from pipeline.models.size_multiple import local_family
from pipeline.recipe import Recipe, load_recipe
from pipeline.storage.atomic import write_text
from pipeline.validated_dataset.holdout import times_drawn

NUMBERS = (4, 6, 8, 12, 16, 20, 28, 36, 48)
"""Of sizes, that are shown unless one is asked for."""

DEFAULT_STEP = 16
"""Of fitted sizes, where the base model is not at hand to be asked what it divides edges by."""

_HEAD = (
    f"{'':22} {'sizes':>5} {'used':>5} {'crop loss':>10} {'worst':>7} {'enlarged':>9} "
    f"{'in full batches':>16} {'anew':>9}"
)


@click.command
@click.argument("recipe", type=RECIPE)
@click.option(
    "--write", type=click.IntRange(1, 200), metavar="K", help="Put at most K sizes into the recipe."
)
@click.option(
    "--step", type=click.IntRange(8, 512), help="Edges in multiples of it; if not said, the model's."
)
@click.option("--free", is_flag=True, help="Portraits need not have the landscapes' sizes turned.")
def command(recipe: Recipe, write: int | None, step: int | None, free: bool) -> None:
    """Fit bucket sizes to the images of RECIPE.

    Shows what several numbers of sizes cost in cropped and enlarged images and unfilled batches, beside the
    recipe's own; `used` is how many of the sizes get images, `anew` how many latents a change would make
    again. --write puts the best list of at most K sizes into the recipe as buckets.sizes, and from then on no
    other image moves an image's bucket.
    """
    _require_one_resolution(recipe)
    images, dataset, source = _datasets(recipe)
    request = Request(
        resolution=recipe.buckets.resolution,
        step=step or _model_step(recipe),
        max_aspect_ratio=recipe.buckets.max_aspect_ratio,
        mirrored=not free,
    )
    click.echo(
        f"{recipe.name}: {counted(len(images), 'image')} of {source}, {dataset.batch_size} at once, budget "
        f"{request.resolution}x{request.resolution}, steps of {request.step}"
    )
    now = placement_of(recipe.buckets)
    click.echo(_HEAD)
    click.echo(_line("as the recipe has it", len(now.sizes), trade_of(now, dataset), 0))
    shown: set[int] = set()
    for number, fit in fitted_lists(dataset, request, (write,) if write else NUMBERS).items():
        if len(fit.sizes) in shown:
            continue
        shown.add(len(fit.sizes))
        anew = _moved(now, fit, images)
        click.echo(_line(f"fitted, at most {number}", len(fit.sizes), fit.trade, anew))
        if write:
            _write(recipe, fit)
            click.echo(f"wrote {counted(len(fit.sizes), 'size')} as buckets.sizes into {recipe.source}")


def _require_one_resolution(recipe: Recipe) -> None:
    settings = recipe.buckets
    for key, given in (
        ("resolutions", bool(settings.resolutions)),
        ("upscale", settings.upscale != "allow"),
    ):
        if given:
            raise BucketError(
                f"sizes are fitted for one resolution that every image is scaled to, and {key} is set",
                where=f"{recipe.source}, buckets.{key}",
                fix=f"remove buckets.{key}, or keep the ladder",
            )


def _datasets(recipe: Recipe) -> tuple[Dataset, Dataset, str]:
    """The sizes of the recipe's images, once each, and as often as an epoch draws them; and their source."""
    from pipeline.raw_images.stage import scan
    from pipeline.storage.tables import Tables

    tables = Tables(recipe.output_dir)
    source = "validated_dataset"
    table = tables.read_previous("validated_dataset")
    if table is None or table.is_empty():
        source = "a scan made just now"
        table = scan(recipe, tables, log=lambda line: click.echo(line, err=True), remember=False).table
        table = table.with_columns(duplicate_group="content_hash")  # look-alikes are not known yet
    times = times_drawn(table, recipe.datasets).to_numpy()
    height, width = (table[name].to_numpy().astype(np.int64) for name in ("height", "width"))
    at_once = recipe.training.batch_size * recipe.accelerate.num_processes
    drawn = Dataset(np.repeat(height, times), np.repeat(width, times), at_once)
    return Dataset(height, width, at_once), drawn, source


def _model_step(recipe: Recipe) -> int:
    """What the base model divides edges by, at least 8; `DEFAULT_STEP` where it cannot be asked."""
    family = local_family(recipe)
    if family is None:  # nothing is downloaded for this
        click.echo(f"{recipe.model.base} is no local model; steps of {DEFAULT_STEP} fit every family")
        return DEFAULT_STEP
    multiple = family.size_multiple()
    return multiple * -(-8 // multiple)


def _line(name: str, num_sizes: int, trade: Trade, anew: int) -> str:
    return (
        f"{name:22} {num_sizes:>5} {trade.num_buckets:>5} {trade.crop_loss:>10.2%} "
        f"{trade.worst_crop_loss:>7.1%} {trade.upscaled:>9.1%} {trade.in_full_batches:>13.1%} {anew:>9,}"
    )


def _moved(now: Placement, fit: FittedList, images: Dataset) -> int:
    """How many images have another geometry with the fitted list, so that their latents are made again."""
    names = [""] * len(images) if now.crop == "random" else None
    made = now.assign_many(images.height, images.width, names)
    after = placement_in(fit.sizes).assign_many(images.height, images.width).columns
    same = made.columns.target_height == after.target_height[made.image]
    same &= made.columns.target_width == after.target_width[made.image]
    return len(images) - len(np.unique(made.image[same]))


def _write(recipe: Recipe, fit: FittedList) -> None:
    """Put the sizes into the recipe's file, which keeps its comments and its order.

    Raises:
        RecipeError: The file would not be a valid recipe; it is as it was.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap, CommentedSeq

    file = Path(recipe.source)
    before = file.read_text(encoding="utf-8")
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
