"""The prompts of an evaluation, each with its role: written in the recipe, or made from the dataset.

With `prompts: auto`, a recipe gets:

    concept   up to `NUM_CAPTIONS` captions of held-out images, and the trigger word alone
    trained   as many captions of trained images
    other     `OTHER_SUBJECTS` in the form of the captions: with trigger word, prefix and postfix
    base      `BASE_PROMPTS`, without any of these
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from pipeline.models.recipe_support import require_preview_prompts
from pipeline.recipe.evaluation import EvaluationPrompt, Role
from pipeline.trained_lora.prompts import Prompt, recipe_prompts
from pipeline.validated_dataset.variants import variants

if TYPE_CHECKING:
    from pipeline.cache.recipe_entries import RecipeEntries
    from pipeline.recipe import DatasetSettings, Recipe

# With 4 captions and 4 seeds, half of the simulated runs have no measurable best step.
NUM_CAPTIONS = 8
"""Maximum number of captions per concept."""

OTHER_SUBJECTS = ("a dog", "a house by a lake", "a bicycle", "a bowl of fruit")
"""Subjects of prompts with the role other."""

BASE_PROMPTS = (
    "a photo of a cat on a sofa",
    "a street with shops",
    "a mountain landscape",
    "a portrait of an old man",
)
"""Prompts with the role base."""

NO_CONCEPT = ""
"""Concept of prompts with the role base."""


@dataclass(frozen=True)
class RolePrompt:
    """A prompt with its role.

    Attributes:
        concept: Name of the concept that the prompt tests, see `concept_of`; `NO_CONCEPT` for base prompts.
    """

    prompt: Prompt
    role: Role
    concept: str


def concept_of(dataset: DatasetSettings) -> str:
    """Return the name of the concept that a dataset teaches: its trigger word, or else the dataset's name."""
    return dataset.captions.trigger or dataset.name


def concepts_of(recipe: Recipe) -> dict[str, list[DatasetSettings]]:
    """Return the trained datasets of each concept, in the order of the recipe."""
    concepts: dict[str, list[DatasetSettings]] = {}
    for dataset in recipe.datasets:
        if dataset.role == "train":
            concepts.setdefault(concept_of(dataset), []).append(dataset)
    return concepts


def evaluation_prompts(
    recipe: Recipe, entries: RecipeEntries, inputs: pl.DataFrame
) -> tuple[RolePrompt, ...]:
    """Return the prompts of an evaluation.

    Args:
        recipe: Recipe with the section `evaluation`, or without it for prompts from the dataset.
        entries: Entries of the recipe with which the run was trained.
        inputs: Training inputs of the run, see `trained_lora.inputs.COLUMNS`.

    Raises:
        RecipeError: A prompt does not suit the base model.
    """
    require_preview_prompts(recipe, entries.family)
    written = recipe.evaluation.prompts if recipe.evaluation else ()
    named = [(_with_triggers(recipe, each), _named_concept(recipe, each)) for each in written]
    return tuple(_drawn(entries, named or _automatic(recipe, inputs)))


def _drawn(entries: RecipeEntries, prompts: Iterable[tuple[EvaluationPrompt, str]]) -> Iterator[RolePrompt]:
    for each, concept in prompts:
        (prompt,) = recipe_prompts(entries, [each.as_preview()])
        yield RolePrompt(prompt, each.role, concept)


def _with_triggers(recipe: Recipe, prompt: EvaluationPrompt) -> EvaluationPrompt:
    negative = prompt.negative_prompt
    texts = {
        "prompt": recipe.with_triggers(prompt.prompt),
        "negative_prompt": negative and recipe.with_triggers(negative),
    }
    return prompt.model_copy(update=texts)


def _named_concept(recipe: Recipe, prompt: EvaluationPrompt) -> str:
    if prompt.role == "base":
        return NO_CONCEPT
    concepts = concepts_of(recipe)
    text = recipe.with_triggers(prompt.prompt)
    for concept, datasets in concepts.items():
        if any(dataset.captions.names_trigger(text) for dataset in datasets):
            return concept
    # Without a trigger word, a prompt cannot name one of several concepts.
    return next(iter(concepts))


def _automatic(recipe: Recipe, inputs: pl.DataFrame) -> Iterator[tuple[EvaluationPrompt, str]]:
    texts = set[str]()
    for concept, datasets in concepts_of(recipe).items():
        captions, trigger = datasets[0].captions, datasets[0].captions.trigger
        rows = inputs.filter(pl.col("dataset").is_in([each.name for each in datasets]))
        trained, held_out = (_captions(rows.filter(held_out=each)) for each in (False, True))
        learned = [*(held_out or trained)[:NUM_CAPTIONS], *([trigger] if trigger else [])]
        repeated = [each for each in trained if each not in held_out][: min(len(held_out), NUM_CAPTIONS)]

        # Without a trigger word, prefix or postfix, another subject would be a prompt of the base model.
        has_form = bool(trigger or captions.prefix or captions.postfix)
        others = [variants(captions, [subject])[0] for subject in OTHER_SUBJECTS] if has_form else []
        roles: list[tuple[Role, list[str]]] = [("concept", learned), ("trained", repeated), ("other", others)]
        for role, prompts in roles:
            for text in prompts:
                if text not in texts:
                    texts.add(text)
                    yield EvaluationPrompt(prompt=text, role=role), concept
    for text in BASE_PROMPTS:
        if text not in texts:
            yield EvaluationPrompt(prompt=text, role="base"), NO_CONCEPT


def _captions(rows: pl.DataFrame) -> list[str]:
    """Return the first captions of images, without repetitions."""
    captions = rows.select(pl.col("captions").list.first()).to_series().unique()

    # By hash, so that neither names of files nor new images in the training set change the choice.
    return sorted((each for each in captions if each), key=_position)


def _position(caption: str) -> bytes:
    return hashlib.sha256(caption.encode("utf-8")).digest()
