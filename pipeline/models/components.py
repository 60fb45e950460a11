"""Replacements for components of the base model: `model.components` in the recipe.

Each is a folder, or a component of the same name in another model. The network is used only for files that
are not on this machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pipeline.errors import ModelError
from pipeline.log import Log, discard
from pipeline.models.diffusers_folder import is_tokenizer, tokenizer_files, weight_files
from pipeline.models.hub import (
    component_files,
    download_files,
    explain_download_errors,
    is_hub_id,
    require_access,
    require_known,
    require_revision,
    resembles_folder,
    suggest_folder,
)
from pipeline.recipe import in_project

if TYPE_CHECKING:
    from pipeline.recipe import ModelSettings

# The folder of every component has one of these.
_CONFIG_NAMES = ("config.json", "tokenizer_config.json")


class NamesModel(Protocol):
    """Names a base model: a recipe, or the order of a worker on another machine."""

    @property
    def model(self) -> ModelSettings:
        """Settings of the base model."""
        ...

    @property
    def source(self) -> Path:
        """The recipe's file, for messages."""
        ...


def resolve_components(recipe: NamesModel, *, log: Log = discard) -> dict[str, Path]:
    """Return the folder of each replaced component, complete, by role.

    Raises:
        ModelError: A folder or file is missing, or a component cannot be downloaded.
    """
    return {
        role: _resolve(role, name, f"{recipe.source}, model.components.{role}", log)
        for role, name in recipe.model.components.given().items()
    }


def require_local_components(recipe: NamesModel) -> None:
    """Raise ModelError for a replaced component that is neither a local folder nor a Hub id.

    A Hub id that resembles a local path is looked up on the Hub.
    """
    for role, name in recipe.model.components.given().items():
        if in_project(name).is_dir():
            continue
        where = f"{recipe.source}, model.components.{role}"
        hub_id, revision = _hub_id(role, name, where)
        if resembles_folder(hub_id) and _local_snapshot(role, hub_id, revision) is None:
            require_known(hub_id, revision, where)


def local_components(recipe: NamesModel) -> dict[str, Path]:
    """Return the folders of the replaced components that are local, by role, without checking them."""
    folders = {role: in_project(name) for role, name in recipe.model.components.given().items()}
    return {role: _component_folder(folder, role) for role, folder in folders.items() if folder.is_dir()}


def _component_folder(folder: Path, role: str) -> Path:
    # `model.components` may name a component's folder, or the folder of a model that contains the component.
    return folder / role if (folder / role).is_dir() else folder


def _resolve(role: str, name: str, where: str, log: Log) -> Path:
    local = in_project(name)
    if local.is_dir():
        folder = _component_folder(local, role)
        _require_complete(role, folder)
        return folder

    hub_id, revision = _hub_id(role, name, where)
    return _local_snapshot(role, hub_id, revision) or _download(role, hub_id, revision, where, log)


def _hub_id(role: str, name: str, where: str) -> tuple[str, str | None]:
    """Return the Hub id and revision of a component without a local folder; ModelError if it is no Hub id."""
    hub_id, _, revision = name.partition("@")
    if is_hub_id(hub_id):
        require_revision(revision or None, where)
        return hub_id, revision or None
    similar_folder = suggest_folder(name)
    fix = (
        f"set model.components.{role} to an existing folder, relative to the project root, or to a "
        "Hub id (owner/name)"
    )
    fix = fix if similar_folder is None else f"did you mean {similar_folder}?"
    raise ModelError(f"{name} does not exist", where=f"{where}, expected at {in_project(name)}", fix=fix)


def _require_complete(role: str, folder: Path) -> None:
    if is_tokenizer(role):
        tokenizer_files(folder)
        return
    weight_files(folder)
    if not (folder / "config.json").is_file():
        fix = f"download it again, or set model.components.{role} to another folder"
        raise ModelError("a component of the base model lacks config.json", where=str(folder), fix=fix)


def _local_snapshot(role: str, hub_id: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    # A complete component in the Hub's cache is used without a request, as warm runs never use the network.

    for folder in (f"{role}/", ""):
        for config_name in _CONFIG_NAMES:
            config = try_to_load_from_cache(hub_id, folder + config_name, revision=revision)
            if isinstance(config, str) and _is_complete(role, Path(config).parent):
                return Path(config).parent
    return None


def _is_complete(role: str, folder: Path) -> bool:
    try:
        _require_complete(role, folder)
    except ModelError:
        return False
    return True


def _download(role: str, hub_id: str, revision: str | None, where: str, log: Log) -> Path:
    from huggingface_hub import HfApi

    with explain_download_errors(hub_id, where):
        require_access(hub_id, revision)
        names = HfApi().list_repo_files(hub_id, revision=revision)
        subfolder = role if any(name.startswith(f"{role}/") for name in names) else ""
        needed = component_files(names, subfolder)
        if is_tokenizer(role):
            # A tokenizer may share its folder with a model, and does not need its weights.
            needed = [name for name in needed if ".safetensors" not in name and ".bin" not in name]
        folder = download_files(hub_id, revision, needed, log=log) / subfolder
    _require_complete(role, folder)
    return folder
