"""The recipe's preview prompts must suit the base model: sizes that it can draw, and negative prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeline.errors import BucketError
from pipeline.images.geometry import Size, not_multiples
from pipeline.models.size_multiple import local_family
from pipeline.recipe.errors import Mistake, recipe_error
from pipeline.recipe.load import placed

if TYPE_CHECKING:
    from pipeline.models.families import Family
    from pipeline.recipe import PreviewPrompt, Recipe


def require_preview_prompts(recipe: Recipe, family: Family | None = None) -> None:
    """Raise RecipeError unless each of `training.sample_prompts` suits the base model.

    Args:
        recipe: The recipe.
        family: Family of its base model. None finds it for a base model in a local folder; any other base
            model is then not checked.

    Raises:
        RecipeError: Lists each key that the base model does not support.
    """
    if not recipe.training.sample_prompts:
        return
    family = family or local_family(recipe)
    mistakes = [] if family is None else list(_mistakes(recipe, family))
    if mistakes:
        raise recipe_error([placed(recipe, mistake) for mistake in mistakes])


def _mistakes(recipe: Recipe, family: Family) -> Iterator[Mistake]:
    multiple, model = family.size_multiple(), f"the base model {recipe.model.base} ({family.name})"
    reason = family.no_negative_prompts
    for index, prompt in enumerate(recipe.training.sample_prompts):
        path = ("training", "sample_prompts", index)
        size = Size(prompt.height or 0, prompt.width or 0)
        if not_multiples([size], multiple):
            what = f"height and width must be multiples of {multiple} for {model}, got {size}"
            nearest = Size(*(max(multiple, round(edge / multiple) * multiple) for edge in size))
            fix = f"use height: {nearest.height} and width: {nearest.width}, or remove both"
            yield Mistake((*path, "height"), what, fix)
        elif _is_too_large(size, family):
            what = f"a preview of {size} (height x width) is too large for {model}"
            yield Mistake((*path, "height"), what, "use a smaller height and width, or remove both")
        if reason and prompt.negative_prompt is not None:
            what = f"previews of {model} cannot have a negative_prompt, because {reason}"
            yield Mistake((*path, "negative_prompt"), what, "remove negative_prompt")
        elif _has_no_effect(prompt, family):
            what = f"negative_prompt has no effect, because {model} is drawn without guidance"
            fix = "add a guidance_scale above 1 to this prompt, or remove negative_prompt"
            yield Mistake((*path, "negative_prompt"), what, fix)


def _has_no_effect(prompt: PreviewPrompt, family: Family) -> bool:
    """Return whether a prompt has a negative prompt that its pictures do not depend on."""
    is_guided = prompt.guidance_scale is not None or family.guidance_scale > 1
    return prompt.negative_prompt is not None and not is_guided


def _is_too_large(size: Size, family: Family) -> bool:
    try:
        family.latent_shape(size)
    except BucketError:
        return True
    return False
