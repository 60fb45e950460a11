"""The recipe: one YAML file that declares datasets, base model and training, validated strictly."""

from __future__ import annotations

from pipeline.recipe.captions import CaptionSettings, DropTagsSettings, ReplaceSettings, ShuffleSettings
from pipeline.recipe.datasets import DatasetSettings, FilterSettings
from pipeline.recipe.load import (
    BrokenRecipe,
    RecipeFolder,
    load_recipe,
    load_recipe_files,
    load_recipe_folder,
    recipe_from_mapping,
    recipes_dir,
)
from pipeline.recipe.lora import LoraSettings, RankSettings, TextEncoderSettings
from pipeline.recipe.masks import MaskSettings
from pipeline.recipe.objective import LossSettings, NoiseSettings, TimestepSettings
from pipeline.recipe.overrides import OVERRIDABLE, changed_values, recipe_values, with_overrides
from pipeline.recipe.preview_prompts import PreviewPrompt
from pipeline.recipe.project import in_project, path_in_recipe, project_root, shareable_path
from pipeline.recipe.references import ReferenceSettings
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
from pipeline.recipe.training import TrainingSettings

__all__ = [
    "OVERRIDABLE",
    "AccelerateSettings",
    "BrokenRecipe",
    "BucketSettings",
    "CaptionSettings",
    "CheckSettings",
    "DatasetSettings",
    "DropTagsSettings",
    "Dtype",
    "FilterSettings",
    "LatentSettings",
    "LoraSettings",
    "LossSettings",
    "MaskSettings",
    "ModelSettings",
    "NoiseSettings",
    "PreviewPrompt",
    "RankSettings",
    "RecacheSettings",
    "Recipe",
    "RecipeFolder",
    "ReferenceSettings",
    "ReplaceSettings",
    "ShuffleSettings",
    "TextEncoderSettings",
    "TextSettings",
    "TimestepSettings",
    "TrainingSettings",
    "changed_values",
    "in_project",
    "load_recipe",
    "load_recipe_files",
    "load_recipe_folder",
    "path_in_recipe",
    "project_root",
    "recipe_from_mapping",
    "recipe_values",
    "recipes_dir",
    "shareable_path",
    "with_overrides",
]
