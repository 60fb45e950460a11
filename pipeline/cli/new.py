"""`latentline new`: write a first recipe for a folder of images."""

from __future__ import annotations

import re
import shlex
import tempfile
from pathlib import Path

import click

from pipeline.cli.conventions import as_recipe_path, echo, report_broken_recipes
from pipeline.errors import RUN_RECIPE, LatentlineError, RecipeError, counted
from pipeline.recipe import recipes_dir
from pipeline.recipe.schema import NAME_PATTERN, valid_name

DEFAULT_BASE = "stabilityai/stable-diffusion-xl-base-1.0"


@click.command(short_help="Write a recipe for a folder of images.")
@click.argument("recipe")
@click.option(
    "--images",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder of images and captions, a file with the captions of many images, or the dataset "
    "configuration of another trainer.",
)
@click.option(
    "--base", default=DEFAULT_BASE, show_default=True, help="Hub id or diffusers folder of the base model."
)
def command(recipe: str, images: Path, base: str) -> None:
    """Write a recipe for a folder of images.

    RECIPE is its name, such as flowers for configs/flowers.yaml. An existing recipe is never overwritten.

    The command detects which files hold the captions, and chooses the resolution that the base model was
    trained at. Captions may also be in one file, such as metadata.jsonl, metadata.csv, captions.json or
    sd-scripts' meta_cap.json, in the folder or as --images. Nothing is downloaded.

    If you come from another trainer, pass its dataset configuration as --images (sd-scripts, OneTrainer,
    ai-toolkit, SimpleTuner or diffusion-pipe), or a folder in sd-scripts' layout, such as 10_rose. The
    command prints which settings it took over and which it could not.
    """
    from pipeline.new_recipe.recipe_text import (
        accepted_references,
        draft_recipe,
        model_resolution,
        new_manifests,
        recipe_text,
        resolution_remarks,
    )

    report_broken_recipes()
    name = Path(recipe).stem if recipe.endswith((".yaml", ".yml")) else recipe
    if not re.fullmatch(NAME_PATTERN, name):
        raise RecipeError(
            f"a recipe's name must consist of letters, digits and _, got {name!r}",
            where=str(recipes_dir()),
            fix=shlex.join(["latentline", "new", valid_name(name), "--images", str(images), "--base", base]),
        )
    file = recipes_dir() / f"{name}.yaml"
    if file.exists():
        raise _already_exists(file)

    base_in_recipe = as_recipe_path(base)
    draft = draft_recipe(images, max_references=accepted_references(base_in_recipe))
    size = model_resolution(base_in_recipe)
    text = recipe_text(name, draft, base_in_recipe, size)
    try:
        _require_valid(name, text, file)
    except LatentlineError as err:
        raise _about_options(err, file, images=images, base=base) from err

    file.parent.mkdir(parents=True, exist_ok=True)
    # The recipe is the last file, so that it never names a manifest that does not exist yet.
    manifests = new_manifests(name, draft)
    for path, content in {**manifests, file: text}.items():
        # Another command may have written the recipe since the check above.
        try:
            with path.open("x", encoding="utf-8") as opened:
                opened.write(content)
        except FileExistsError as err:
            raise _already_exists(path) from err

    for line in (*draft.report(), *resolution_remarks(draft, size)):
        echo(line)
    for path in manifests:
        echo(f"wrote {path}: the captions in the form that a recipe reads")
    echo(f"wrote {file}: {counted(draft.num_images, 'image')}")
    for line in draft.warnings():
        echo(f"WARNING: {line}", err=True)
    echo(f"next: latentline plan {name}     shows what would be encoded, and gates that would close")
    echo(f"then: {RUN_RECIPE} {name}")


def _already_exists(file: Path) -> RecipeError:
    return RecipeError(
        f"{file.name} already exists and is never overwritten",
        where=str(file),
        fix="choose another name, or edit that file",
    )


def _about_options(err: LatentlineError, file: Path, *, images: Path, base: str) -> LatentlineError:
    # The error names the file that would have been written. The user knows only the options.
    in_base, in_file = f"{file}, model.base", str(file)
    if err.where.startswith(in_base):
        where = f"--base {base}{err.where.removeprefix(in_base)}"
    elif err.where.startswith(in_file):
        rest = err.where.removeprefix(in_file)
        where = f"the new recipe for --images {images} --base {base}{rest}"
    else:
        return err
    return type(err)(err.what, where=where, fix=err.fix)


def _require_valid(name: str, text: str, file: Path) -> None:
    """Check the recipe as `latentline validate` would, before it is written to `file`."""
    from pipeline.cli.validate import check_settings
    from pipeline.recipe import load_recipe

    with tempfile.TemporaryDirectory(prefix="latentline-") as scratch:
        trial = Path(scratch) / f"{name}.yaml"
        trial.write_text(text, encoding="utf-8")
        check_settings(load_recipe(trial).model_copy(update={"source": file}))
