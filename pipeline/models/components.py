"""Parts of the base model that a recipe takes from elsewhere: `model.components`.

Each is a folder of its own, or lies in another model under its own name. The network is used only for what is
not on this machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import ModelError
from pipeline.models.diffusers_folder import tokenizer_files, weight_files
from pipeline.models.hub import component_files, explain_download_errors, is_hub_id
from pipeline.recipe import in_project

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

_MARKS = ("config.json", "tokenizer_config.json")
"""One of them is in each component's folder."""


def resolve_components(recipe: Recipe) -> dict[str, Path]:
    """Folder of each component that the recipe takes from elsewhere, with all its files.

    Raises:
        ModelError: There is no such folder, a file is missing, or it cannot be downloaded.
    """
    return {
        role: _resolved(role, named, f"{recipe.source}, model.components.{role}")
        for role, named in recipe.model.components.given().items()
    }


def local_components(recipe: Recipe) -> dict[str, Path]:
    """Those of `resolve_components` that are local folders; of the others nothing is asked."""
    folders = {role: in_project(named) for role, named in recipe.model.components.given().items()}
    return {role: _inside(folder, role) for role, folder in folders.items() if folder.is_dir()}


def _inside(folder: Path, role: str) -> Path:
    """The folder's part of that name where it is a model, or else the folder itself."""
    return folder / role if (folder / role).is_dir() else folder


def _resolved(role: str, named: str, where: str) -> Path:
    local = in_project(named)
    if local.is_dir():
        place = _inside(local, role)
        _require_complete(role, place)
        return place
    name, _, revision = named.partition("@")
    if not is_hub_id(name):
        raise ModelError(
            f"{named} does not exist",
            where=f"{where}, looked for {local}",
            fix="set it to an existing folder, relative to the project root, or to a Hub id (owner/name)",
        )
    return _local_snapshot(role, name, revision or None) or _downloaded(role, name, revision or None, where)


def _require_complete(role: str, place: Path) -> None:
    """Nothing, when the folder holds what `role` needs.

    Raises:
        ModelError: A file is missing.
    """
    if role.startswith("tokenizer"):
        tokenizer_files(place)
        return
    weight_files(place)
    if not (place / "config.json").is_file():
        fix = "download it again, or name another folder"
        raise ModelError("a component of the base model has no config.json", where=str(place), fix=fix)


def _local_snapshot(role: str, name: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    for folder in (f"{role}/", ""):
        for mark in _MARKS:
            found = try_to_load_from_cache(name, folder + mark, revision=revision)
            if isinstance(found, str) and _is_complete(role, Path(found).parent):
                return Path(found).parent
    return None


def _is_complete(role: str, place: Path) -> bool:
    try:
        _require_complete(role, place)
    except ModelError:
        return False
    return True


def _downloaded(role: str, name: str, revision: str | None, where: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    with explain_download_errors(name, where):
        names = HfApi().list_repo_files(name, revision=revision)
        inside = role if any(each.startswith(f"{role}/") for each in names) else ""
        wanted = _without_weights(role, component_files(names, inside))
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=wanted)) / inside
    _require_complete(role, folder)
    return folder


def _without_weights(role: str, files: list[str]) -> list[str]:
    """A tokenizer may lie beside a model, whose weights it does not need."""
    if not role.startswith("tokenizer"):
        return files
    return [name for name in files if ".safetensors" not in name and ".bin" not in name]
