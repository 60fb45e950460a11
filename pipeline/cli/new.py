"""`latentline new`: a first recipe for a folder of images."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import click

from pipeline.cli.arguments import as_recipes_have_it
from pipeline.errors import RecipeError, counted
from pipeline.recipe import recipes_dir
from pipeline.recipe.schema import NAME_PATTERN

DEFAULT_BASE = "stabilityai/stable-diffusion-xl-base-1.0"


@click.command
@click.argument("recipe")
@click.option(
    "--images", required=True, type=click.Path(path_type=Path), help="The folder of images and captions."
)
@click.option(
    "--base", default=DEFAULT_BASE, show_default=True, help="Hub id or diffusers folder of the base model."
)
def command(recipe: str, images: Path, base: str) -> None:
    """Write a recipe named RECIPE, such as flowers, for a folder of images; nothing is replaced.

    Looks at the folder for its captions, and at the model for its resolution; nothing is downloaded.
    """
    from pipeline.maintenance.draft.look import look_at
    from pipeline.maintenance.draft.size import size_of
    from pipeline.maintenance.draft.text import draft

    name = Path(recipe).stem if recipe.endswith((".yaml", ".yml")) else recipe
    if not re.fullmatch(NAME_PATTERN, name):
        better = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_") or "flowers"
        what = f"a recipe's name may hold only letters, digits and _, and {name!r} does not"
        raise RecipeError(what, where=str(recipes_dir()), fix=f"latentline new {better} --images {images}")
    file = recipes_dir() / f"{name}.yaml"
    if file.exists():
        raise _exists(file)
    groups = look_at(images)
    base = as_recipes_have_it(base)
    text = draft(name, groups, base, size_of(base))
    _require_valid(name, text, file)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError as err:
        raise _exists(file) from err
    click.echo(f"wrote {file}: {counted(sum(group.num_images for group in groups), 'image')}")
    click.echo(f"next: latentline plan {name}     what would be encoded, or which gate would stop it")
    click.echo(f"then: dagster job execute -m assets.definitions -j {name}_train")


def _exists(file: Path) -> RecipeError:
    fix = "choose another name, or edit that file"
    return RecipeError(
        "there is a recipe of that name, and nothing is ever replaced", where=str(file), fix=fix
    )


def _require_valid(name: str, text: str, file: Path) -> None:
    """Nothing, where the recipe will be one that `latentline validate` takes.

    Raises:
        RecipeError: A value in it cannot be.
        ModelError: The base model cannot be.
        PathIsolationError: The images lie in the cache or in the output folder, or they in it.
    """
    from pipeline.models.resolve import check_local_base
    from pipeline.models.size_multiple import require_size_multiple
    from pipeline.recipe import load_recipe
    from pipeline.recipe.isolation import require_isolation
    from pipeline.recipe.load import require_own_output

    with tempfile.TemporaryDirectory(prefix="latentline-") as scratch:
        trial = Path(scratch) / f"{name}.yaml"
        trial.write_text(text, encoding="utf-8")
        recipe = load_recipe(trial).model_copy(update={"source": file})
        require_isolation(recipe)
        require_own_output(recipe)
        check_local_base(recipe)
        require_size_multiple([recipe])
