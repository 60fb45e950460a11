"""The recipe: one YAML file that declares a dataset, a model and a training, validated strictly."""

from __future__ import annotations

from pipeline.recipe.datasets import (
    CaptionSettings,
    DatasetSettings,
    FilterSettings,
    ShuffleSettings,
)
from pipeline.recipe.load import (
    in_project,
    load_recipe,
    load_recipes,
    path_in_recipe,
    project_root,
    recipe_from_mapping,
    recipes_dir,
)
from pipeline.recipe.lora import LoraSettings, RankSettings
from pipeline.recipe.objective import LossSettings, NoiseSettings, TimestepSettings
from pipeline.recipe.overrides import OVERRIDABLE, differing, recipe_values, with_overrides
from pipeline.recipe.schema import (
    AccelerateSettings,
    BucketSettings,
    CheckSettings,
    Dtype,
    LatentSettings,
    ModelSettings,
    RecacheSettings,
    Recipe,
    TextSettings,
)
from pipeline.recipe.text_encoders import TextEncoderSettings
from pipeline.recipe.training import TrainingSettings

__all__ = [
    "OVERRIDABLE",
    "AccelerateSettings",
    "BucketSettings",
    "CaptionSettings",
    "CheckSettings",
    "DatasetSettings",
    "Dtype",
    "FilterSettings",
    "LatentSettings",
    "LoraSettings",
    "LossSettings",
    "ModelSettings",
    "NoiseSettings",
    "RankSettings",
    "RecacheSettings",
    "Recipe",
    "ShuffleSettings",
    "TextEncoderSettings",
    "TextSettings",
    "TimestepSettings",
    "TrainingSettings",
    "differing",
    "in_project",
    "load_recipe",
    "load_recipes",
    "path_in_recipe",
    "project_root",
    "recipe_from_mapping",
    "recipe_values",
    "recipes_dir",
    "with_overrides",
]
