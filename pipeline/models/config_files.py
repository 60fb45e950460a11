"""The configuration files of a base model, without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.models.components import local_components
from pipeline.models.families import family_spec
from pipeline.models.hub import explain_download_errors
from pipeline.models.resolve import indexed_snapshot, local_base

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

_CONFIG_PATTERNS = ("config.json", "scheduler_config.json", "tokenizer_config.json")
"""Names of the configuration files of components."""


def config_folder(recipe: Recipe) -> tuple[Path, dict[str, Path]]:
    """Return the folder of the recipe's base model with at least its configuration files.

    Of a model on the Hub that is not on this machine, these files are downloaded, some kilobytes.

    Returns:
        The folder, and the folders of replaced components that are on this machine, by role. Components that
        are replaced by others on the Hub count as parts of the base model.

    Raises:
        ModelError: `model.base` is neither a folder nor a Hub id, or a file cannot be downloaded.
        FamilyError: The family of its pipeline class is not supported.
    """
    replaced = local_components(recipe)
    local = local_base(recipe)
    if local is not None:
        return local, replaced

    base, revision, where = recipe.model.base, recipe.model.revision, f"{recipe.source}, model.base"
    folder = indexed_snapshot(base, revision, where)
    roles = [role for role in family_spec(folder).components if role not in replaced]
    if any(not _has_config(folder / role) for role in roles):
        from huggingface_hub import snapshot_download

        wanted = [f"{role}/{name}" for role in roles for name in _CONFIG_PATTERNS]
        with explain_download_errors(base, where):
            folder = Path(snapshot_download(base, revision=revision, allow_patterns=wanted))
    return folder, replaced


def _has_config(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _CONFIG_PATTERNS)
