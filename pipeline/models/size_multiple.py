"""Do a recipe's buckets suit its base model? Asked when recipes are loaded, before anything is computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pipeline.errors import LatentlineError, counted
from pipeline.recipe import in_project
from pipeline.recipe.errors import Mistake, recipe_error
from pipeline.recipe.load import placed

if TYPE_CHECKING:
    from pipeline.models.families import Family
    from pipeline.recipe import Recipe

_MODEL_INDEX = "model_index.json"


def local_family(recipe: Recipe) -> Family | None:
    """The family of a base model that is a local folder; None for all others, which no one is asked for here.

    A folder that is no model of a known family gives None too: the job that needs it says what is wrong.
    """
    folder = in_project(recipe.model.base)
    if not (folder / _MODEL_INDEX).is_file():
        return None
    from pipeline.models.components import local_components
    from pipeline.models.families import detect

    try:
        return detect(folder, local_components(recipe))
    except LatentlineError:
        return None


def require_size_multiple(recipes: Iterable[Recipe]) -> None:
    """Nothing, when each local base model can divide the edges of all buckets its recipe may use.

    Raises:
        RecipeError: Lists the key of every recipe that is wrong, with the model's multiple.
    """
    wrong = [
        placed(recipe, mistake)
        for recipe in recipes
        if (mistake := _indivisible(recipe, local_family(recipe)))
    ]
    if wrong:
        raise recipe_error(wrong)


def _indivisible(recipe: Recipe, family: Family | None) -> Mistake | None:
    if family is None:
        return None
    from pipeline.images.geometry import not_multiples, placement_of

    multiple, settings = family.size_multiple(), recipe.buckets
    wrong = not_multiples(placement_of(settings).sizes, multiple)
    model = f"the base model {recipe.model.base} ({family.name}) divides edges by {multiple}"
    if wrong and settings.sizes:
        what = f"{len(wrong)} of {counted(len(settings.sizes), 'size')} cannot be: {model}"
        what += f", and {', '.join(str(size) for size in wrong[:5])} cannot be divided by it"
        fix = f"use edges that are multiples of {multiple}; `latentline fit-buckets` finds some"
        return Mistake(("buckets", "sizes"), what, fix)
    # A small image's bucket of its own has edges that are multiples of step.
    own = settings.upscale_limit is not None and settings.small_images == "own_bucket"
    if wrong or (own and settings.step % multiple):
        what = f"step {settings.step} makes sizes that cannot be: {model}"
        return Mistake(("buckets", "step"), what, f"set buckets.step to a multiple of {multiple}")
    return None
