"""The reference images of a recipe must suit the base model: how many it sees, and whether it needs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeline.errors import counted
from pipeline.models.size_multiple import local_family
from pipeline.recipe.errors import Mistake, recipe_error
from pipeline.recipe.load import placed
from pipeline.recipe.settings import one_of

if TYPE_CHECKING:
    from pipeline.models.families import Family
    from pipeline.recipe import Recipe


def require_references(recipe: Recipe, family: Family | None = None) -> None:
    """Raise RecipeError unless the base model sees the references of each dataset.

    Args:
        recipe: The recipe.
        family: Family of its base model. None finds it for a base model in a local folder; any other base
            model is then not checked.

    Raises:
        RecipeError: Lists each dataset with too many references, or without those that the model requires.
    """
    family = family or local_family(recipe)
    mistakes = [] if family is None else list(_mistakes(recipe, family))
    if mistakes:
        raise recipe_error([placed(recipe, mistake) for mistake in mistakes])


def _mistakes(recipe: Recipe, family: Family) -> Iterator[Mistake]:
    spec, model = family.spec.references, f"the base model {recipe.model.base} ({family.name})"
    if recipe.latents.flip and family.text_images is not None and any(d.references for d in recipe.datasets):
        what = f"the text encoder of {model} sees the references and has no embeddings of mirrored ones"
        yield Mistake(("latents", "flip"), what, "set latents.flip: false")
    for index, dataset in enumerate(recipe.datasets):
        path, number = ("datasets", index, "references"), len(dataset.references)
        if spec is None and number:
            what = f"{model} accepts no reference images, got {counted(number, 'reference')}"
            yield Mistake(path, what, f"remove references, or set model.base to {_editing_models()}")
        elif spec is not None and number > spec.max_number:
            limit = counted(spec.max_number, "reference image")
            what = f"{model} accepts at most {limit}, got {number}"
            yield Mistake(path, what, f"keep at most {spec.max_number} of them")
        elif spec is not None and spec.required and not number:
            what = f"{model} requires a reference image for each image, got none"
            yield Mistake(path, what, "add references: [{path: data/before}]")


def _editing_models() -> str:
    # Imported late, because recipes are validated without families.
    from pipeline.models.families import FAMILIES

    names = [spec.name for spec in FAMILIES if spec.references is not None]
    return f"a {one_of(names)} model" if names else "a model that edits images"
