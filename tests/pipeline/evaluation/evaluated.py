"""Helpers that evaluate a trained project in this process."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import polars as pl

from pipeline.cache.entry_format import PICTURE
from pipeline.evaluation.pictures import picture_spec, picture_table
from pipeline.evaluation.prepare import Evaluation, Request, prepare_evaluation
from pipeline.recipe.evaluation import EvaluationSettings

if TYPE_CHECKING:
    from pipeline.recipe import Recipe
    from tests.pipeline.trained_lora.project import Project

PROMPTS: list[dict[str, Any]] = [
    {"prompt": "a red cat", "role": "concept", "steps": 2},
    {"prompt": "a blue rocket", "role": "base", "steps": 2, "height": 32, "width": 64},
]

SCORER = "tests.pipeline.evaluation.colour_scorer:ColourScorer"


def settings(**values: Any) -> EvaluationSettings:
    usual = {"prompts": PROMPTS, "pictures": 1, "scorers": [SCORER]}
    return EvaluationSettings.model_validate_json(json.dumps(usual | values))


def evaluated_recipe(project: Project, **values: Any) -> Recipe:
    return project.recipe.model_copy(update={"evaluation": settings(**values)})


def prepared(recipe: Recipe, **request: Any) -> Evaluation:
    return prepare_evaluation(recipe, Request(**request))


def pixels_of(evaluation: Evaluation) -> dict[tuple[int, float, str, int], npt.NDArray[np.uint8]]:
    """Return each picture of the cache by step, strength, prompt and seed."""
    store = evaluation.entries.store
    rows: pl.DataFrame = picture_table(evaluation)
    return {
        (row["step"], row["strength"], row["prompt"], row["seed"]): store.read(picture_spec(row))[PICTURE]
        for row in rows.iter_rows(named=True)
    }
