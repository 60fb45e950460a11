"""`latentline edit-caption`: replace the caption of one image without changing the dataset."""

from __future__ import annotations

import click

from pipeline.cli.conventions import RECIPE_WITH_OUTPUTS, echo, log_to_stderr
from pipeline.cli.json_output import give
from pipeline.errors import DatasetError
from pipeline.maintenance.explain import find_sample
from pipeline.recipe import Recipe
from pipeline.recipe.isolation import require_isolation
from pipeline.storage.tables import Tables
from pipeline.validated_dataset.edited_captions import (
    EditedCaptions,
    current_captions,
    edit_captions,
    restore_captions,
)


@click.command(short_help="Replace the caption of one image.")
@click.argument("recipe", type=RECIPE_WITH_OUTPUTS)
@click.argument("sample", required=False)
@click.argument("texts", metavar="[CAPTION]...", nargs=-1)
@click.option("--restore", is_flag=True, help="Delete the edited caption, so that the dataset's is used.")
def command(recipe: Recipe, sample: str | None, texts: tuple[str, ...], restore: bool) -> None:
    """Replace the caption of SAMPLE in RECIPE by CAPTION, or by several captions.

    The caption is written to output_dir/captions/<sample id>.txt and wins over the caption of the dataset,
    whose files never change. The next job encodes it and no other caption. Trigger word, prefix, postfix and
    shuffling apply to it; captions.replace does not.

    SAMPLE is the sample id, which is the dataset's name and the path in the dataset, such as
    photos/rose_01.jpg, or a part of it that occurs in no other sample id. Put -- in front of a CAPTION that
    begins with a dash. Without CAPTION, the command shows the captions of the image. Without SAMPLE, it lists
    the images with edited captions.
    """
    require_isolation(recipe)
    if sample is None:
        _list(recipe)
        return
    if restore and texts:
        raise click.UsageError("--restore excludes CAPTION.")

    tables = Tables(recipe.output_dir, log=log_to_stderr)
    sample_id = find_sample(tables, sample)
    if restore:
        existed = restore_captions(recipe, sample_id, log_to_stderr)
        text = "has the caption of the dataset again" if existed else "has no edited caption"
        echo(f"{sample_id} {text}")
        give({"sample_id": sample_id, "restored": existed})
    elif texts:
        echo(f"{sample_id}: {edit_captions(recipe, sample_id, texts, log_to_stderr)}")
        give({"sample_id": sample_id, "captions": texts})
    if restore or texts:
        echo(f"the next job reads it: latentline run {recipe.name}")
    else:
        _show(recipe, tables, sample_id)


def _show(recipe: Recipe, tables: Tables, sample_id: str) -> None:
    raw = tables.read("raw_images", ["sample_id", "path"])
    paths = dict(raw.rows())
    if sample_id not in paths:
        raise DatasetError(
            f"{sample_id} was rejected by the scan, so it has no caption",
            where=str(tables.path("raw_images")),
            fix=f"latentline explain {recipe.name} {sample_id} shows why",
        )
    caption = current_captions(recipe, sample_id, paths[sample_id])
    echo(f"{sample_id}, from {caption.source}")
    for text in caption.texts:
        echo(f"  {text}")
    give({"sample_id": sample_id, "captions": caption.texts, "source": caption.source})


def _list(recipe: Recipe) -> None:
    files = EditedCaptions(recipe.output_dir).files
    for sample_id in files:
        echo(sample_id)
    if not files:
        echo("no caption is edited")
    give({"edited": [*files]})
