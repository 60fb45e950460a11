"""References, preview prompts and some training settings of a recipe must suit its base model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pipeline.errors import BucketError, counted
from pipeline.images.decode import read_header
from pipeline.images.formats import ImageError
from pipeline.images.geometry import Size, not_multiples
from pipeline.models.size_multiple import local_family
from pipeline.recipe.errors import Mistake, recipe_error
from pipeline.recipe.load import placed
from pipeline.recipe.schema import PLACEHOLDER_FIX
from pipeline.recipe.settings import one_of

if TYPE_CHECKING:
    from pipeline.models.families import Family
    from pipeline.recipe import PreviewPrompt, Recipe
    from pipeline.recipe.evaluation import EvaluationPrompt
    from pipeline.recipe.yaml_document import KeyPath


AnyPrompt: TypeAlias = "PreviewPrompt | EvaluationPrompt"


def require_references(recipe: Recipe, family: Family | None = None) -> None:
    """Raise RecipeError unless the base model sees the references of each dataset.

    Without a family, only a base model in a local folder is checked.
    """
    family = family or local_family(recipe)
    mistakes = [] if family is None else list(_dataset_mistakes(recipe, family))
    if mistakes:
        raise recipe_error([placed(recipe, mistake) for mistake in mistakes])


def _dataset_mistakes(recipe: Recipe, family: Family) -> Iterator[Mistake]:
    spec, model = family.spec.references, f"the base model {recipe.model.base} ({family.spec.name})"
    for index, dataset in enumerate(recipe.datasets):
        path, number = ("datasets", index, "references"), len(dataset.references)
        if number and family.text_images is not None and dataset.name in recipe.mirrored_datasets:
            what = f"the text encoder of {model} sees the references and has no embeddings of mirrored ones"
            fix = f"set flip: false for the dataset {dataset.name}"
            if dataset.flip is None:
                yield Mistake(("latents", "flip"), what, f"set latents.flip: false, or {fix}")
            else:
                yield Mistake(("datasets", index, "flip"), what, fix)
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
    # Families are imported only for the message, because most recipes are validated without them.
    from pipeline.models.families import FAMILIES

    names = [spec.name for spec in FAMILIES if spec.references is not None]
    return f"a {one_of(names)} model" if names else "a model that edits images"


def require_training_settings(recipe: Recipe, family: Family | None = None) -> None:
    """Raise RecipeError if the base model has no finite `training.loss.weighting`, or reads no `guidance`.

    Without a family, only a base model in a local folder is checked.
    """
    family = family or local_family(recipe)
    if family is None:
        return
    mistakes = [_weighting_mistake(recipe, family), _guidance_mistake(recipe, family)]
    if any(mistakes):
        raise recipe_error([placed(recipe, mistake) for mistake in mistakes if mistake is not None])


def _guidance_mistake(recipe: Recipe, family: Family) -> Mistake | None:
    guidance = recipe.training.guidance
    if family.takes_guidance or guidance == type(recipe.training).model_fields["guidance"].default:
        return None
    what = f"training.guidance requires a base model with distilled guidance, but {recipe.model.base} "
    what += f"({family.spec.name}) takes no guidance scale, got {guidance}"
    fix = "remove it; sample_prompts[].guidance_scale sets the scale of a preview"
    return Mistake(("training", "guidance"), what, fix)


def _weighting_mistake(recipe: Recipe, family: Family) -> Mistake | None:
    if recipe.training.loss.weighting == "none":
        return None

    # Families are imported only here, because most recipes are validated without them.
    from pipeline.models.families.parts.noise import BetaNoise

    # The weight of a noise prediction is a quotient by the SNR. A velocity's is one by SNR + 1.
    noise, training = family.spec.noise, recipe.training
    if not isinstance(noise, BetaNoise) or family.prediction_type() != "epsilon":
        return None

    last, num_timesteps = noise.last_timestep_with_signal(family.model), family.num_timesteps

    # Noise levels are below `max`. The product is rounded, because 0.999 has no exact binary value.
    highest = math.ceil(round(training.timesteps.max * num_timesteps, 6)) - 1
    if highest <= last:
        return None

    what = f"loss.weighting: {training.loss.weighting} divides by the signal-to-noise ratio, which is 0 at "
    what += f"timestep {last + 1} of the base model {recipe.model.base} ({family.spec.name}): it predicts "
    what += "noise, and its schedule ends without signal"

    # Rounded down, because 0.666667 of 3 timesteps would include the last one.
    limit = math.floor(round((last + 1) / num_timesteps * 10**6, 3)) / 10**6
    fix = f"set training.timesteps.max to {limit:g}, so that timesteps without signal "
    fix += "are not trained on, or loss.weighting to none"
    return Mistake(("training", "loss", "weighting"), what, fix)


def require_preview_prompts(recipe: Recipe, family: Family | None = None) -> None:
    """Raise RecipeError unless each prompt of the previews and of the evaluation suits the base model.

    Without a family, a base model that is not in a local folder is not checked, only the files of references.
    """
    previews, evaluation = recipe.training.sample_prompts, recipe.evaluation
    mistakes = _mistakes_of(recipe, previews, ("training", "sample_prompts"), family)
    if evaluation is not None:
        mistakes += _mistakes_of(recipe, evaluation.prompts, ("evaluation", "prompts"), family)
        mistakes += _automatic_mistakes(recipe, family or local_family(recipe))
    if mistakes:
        raise recipe_error([placed(recipe, mistake) for mistake in mistakes])


def _automatic_mistakes(recipe: Recipe, family: Family | None) -> Iterator[Mistake]:
    spec = None if family is None else family.spec.references
    if spec is not None and spec.required and recipe.evaluation is not None and not recipe.evaluation.prompts:
        what = f"evaluation.prompts must be written for the base model {recipe.model.base}, which needs a "
        what += "reference image for each picture, got auto"
        fix = "write prompts: [{prompt: remove the car, references: [street.png], role: concept}]"
        yield Mistake(("evaluation",), what, fix)


def _mistakes_of(
    recipe: Recipe, prompts: Sequence[AnyPrompt], key: KeyPath, family: Family | None
) -> list[Mistake]:
    if not prompts:
        return []
    family = family or local_family(recipe)
    mistakes = [] if family is None else list(_prompt_mistakes(recipe, prompts, key, family))
    mistakes += _reference_mistakes(recipe, prompts, key, family)
    return [*mistakes, *_placeholder_mistakes(recipe, prompts, key)]


def _prompt_mistakes(
    recipe: Recipe, prompts: Sequence[AnyPrompt], key: KeyPath, family: Family
) -> Iterator[Mistake]:
    multiple, model = family.size_multiple(), f"the base model {recipe.model.base} ({family.spec.name})"
    reason = family.no_negative_prompts
    for index, prompt in enumerate(prompts):
        path = (*key, index)

        # 0 is a multiple of every number: a prompt without a size has a bucket's size.
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


def _placeholder_mistakes(recipe: Recipe, prompts: Sequence[AnyPrompt], key: KeyPath) -> Iterator[Mistake]:
    for index, prompt in enumerate(prompts):
        texts = {"prompt": prompt.prompt, "negative_prompt": prompt.negative_prompt or ""}
        for name, text in texts.items():
            if what := recipe.placeholder_mistake(text):
                yield Mistake((*key, index, name), what, PLACEHOLDER_FIX)


def _reference_mistakes(
    recipe: Recipe, prompts: Sequence[AnyPrompt], key: KeyPath, family: Family | None
) -> Iterator[Mistake]:
    model = "" if family is None else f"the base model {recipe.model.base} ({family.spec.name})"
    for index, prompt in enumerate(prompts):
        path, number = (*key, index, "references"), len(prompt.references)
        spec = None if family is None else family.spec.references
        if family is not None and spec is None and number:
            yield Mistake(path, f"{model} accepts no reference images, got {number}", "remove references")
            continue
        if spec is not None and spec.required and not number:
            what = f"{model} requires a reference image for each preview, got none"
            yield Mistake((*key, index), what, "add references: [before.png]")
        yield from reference_mistakes(recipe, family, prompt.references, path)


def reference_mistakes(
    recipe: Recipe, family: Family | None, files: Sequence[Path], path: tuple[str | int, ...]
) -> Iterator[Mistake]:
    """Yield a mistake if a picture has too many reference images, and one for each unsuitable file.

    The base model accepts references, unless its family is unknown. `path` is the place of the references.
    """
    spec = None if family is None else family.spec.references
    if family is not None and spec is not None and len(files) > spec.max_number:
        limit = counted(spec.max_number, "reference image")
        model = f"the base model {recipe.model.base} ({family.spec.name})"
        what = f"{model} accepts at most {limit}, got {len(files)}"
        yield Mistake(path, what, f"keep at most {spec.max_number} of them")

    for place, file in enumerate(files):
        try:
            size = read_header(file, max_px=recipe.checks.max_image_pixels).size
            if family is not None and spec is not None:
                spec.size(family.model, size)
        except ImageError as err:
            yield Mistake((*path, place), f"the reference {file} cannot be read: {err.detail}", err.fix)
        except BucketError as err:
            yield Mistake((*path, place), err.what, "use another reference image")


def _has_no_effect(prompt: AnyPrompt, family: Family) -> bool:
    is_guided = prompt.guidance_scale is not None or family.spec.guidance_scale > 1
    return prompt.negative_prompt is not None and not is_guided


def _is_too_large(size: Size, family: Family) -> bool:
    try:
        family.latent_shape(size)
    except BucketError:
        return True
    return False
