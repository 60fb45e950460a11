"""Every bucket edge must be a multiple of the base model's size multiple, checked when recipes load."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pipeline.errors import LatentlineError, counted
from pipeline.models.diffusers_folder import index_file
from pipeline.recipe import in_project
from pipeline.recipe.errors import Mistake, recipe_error
from pipeline.recipe.load import placed

if TYPE_CHECKING:
    from pipeline.models.families import Family
    from pipeline.recipe import BucketSettings, Recipe

_MAX_SIZES_SHOWN = 5


def local_family(recipe: Recipe) -> Family | None:
    """Return the family of a base model in a local folder, or None for any other base model."""
    folder = in_project(recipe.model.base)
    if not index_file(folder).is_file():
        return None

    # Families are imported only for recipes with a local base model.
    from pipeline.models.components import local_components
    from pipeline.models.families import detect

    # The job reports the error when it resolves the model.
    try:
        return detect(folder, local_components(recipe))
    except LatentlineError:
        return None


def require_size_multiple(recipes: Iterable[Recipe]) -> None:
    """Raise RecipeError unless every bucket edge suits the local base model of its recipe."""
    mistakes = [
        placed(recipe, mistake)
        for recipe in recipes
        if (mistake := _size_mistake(recipe, local_family(recipe)))
    ]
    if mistakes:
        raise recipe_error(mistakes)


def _size_mistake(recipe: Recipe, family: Family | None) -> Mistake | None:
    if family is None:
        return None
    settings = dict.fromkeys(recipe.buckets_of(dataset) for dataset in recipe.datasets)
    return next(filter(None, (_mistake_of(each, recipe, family) for each in settings)), None)


def _mistake_of(settings: BucketSettings, recipe: Recipe, family: Family) -> Mistake | None:
    # Loading the definitions calls this function, and most recipes need neither families nor NumPy for it.
    from pipeline.images.geometry import not_multiples, placement_of

    multiple = family.size_multiple()
    wrong_sizes = not_multiples(placement_of(settings).sizes, multiple)
    model = f"the base model {recipe.model.base} ({family.spec.name})"

    if wrong_sizes and settings.sizes:
        shown = ", ".join(str(size) for size in wrong_sizes[:_MAX_SIZES_SHOWN])
        what = f"{len(wrong_sizes)} of {counted(len(settings.sizes), 'size')} must have edges that are "
        what += f"multiples of {multiple} for {model}, got {shown}"
        fix = f"use edges that are multiples of {multiple}; `latentline fit-buckets` finds some"
        return Mistake(("buckets", "sizes"), what, fix)

    # The bucket of a small image has edges that are multiples of step.
    has_own_buckets = settings.upscale_limit is not None and settings.small_images == "own_bucket"
    if wrong_sizes or (has_own_buckets and settings.step % multiple):
        what = f"buckets.step must be a multiple of {multiple} for {model}, got {settings.step}"
        return Mistake(("buckets", "step"), what, f"set buckets.step to a multiple of {multiple}")
    return None
