"""The training adapter of a distilled base model: `model.training_adapter` in the recipe.

The network is used only if the file is not on this machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import ModelError
from pipeline.log import Log, discard
from pipeline.models.hub import (
    REQUEST_TIMEOUT_S,
    download_files,
    explain_download_errors,
    is_hub_id,
    require_known,
    resembles_folder,
)
from pipeline.recipe import in_project

if TYPE_CHECKING:
    from pipeline.models.families import Family
    from pipeline.recipe import Recipe

ADAPTER_KEY = "model.training_adapter"

_SUFFIX = ".safetensors"


def resolve_training_adapter(recipe: Recipe, *, log: Log = discard) -> Path | None:
    """Return the file of the recipe's training adapter, or None if it has none.

    The value is a local file, relative to the project root, if one exists, and otherwise a Hub id, which may
    be followed by the name of a file in the repository.

    Raises:
        ModelError: The file is missing, or cannot be downloaded.
    """
    value = recipe.model.training_adapter
    local = local_training_adapter(recipe)
    if value is None or local is not None:
        return local
    where = f"{recipe.source}, {ADAPTER_KEY}"
    return _downloaded(*_hub_file(value, where), where, log)


def local_training_adapter(recipe: Recipe) -> Path | None:
    """Return `resolve_training_adapter` if the file is on this machine, otherwise None, without a download.

    Raises:
        ModelError: The recipe names neither a file nor a file of the Hub.
    """
    value = recipe.model.training_adapter
    if value is None:
        return None
    if (local := in_project(value)).is_file():
        return local
    where = f"{recipe.source}, {ADAPTER_KEY}"
    return _cached(*_hub_file(value, where), where)


def check_training_adapter(recipe: Recipe) -> None:
    """Raise the error of `resolve_training_adapter` if this machine already shows that it will fail.

    An adapter on the Hub is not checked, unless its id resembles a local path.
    """
    value, where = recipe.model.training_adapter, f"{recipe.source}, {ADAPTER_KEY}"
    if value is None or in_project(value).is_file():
        return
    name, file = _hub_file(value, where)
    if resembles_folder(name) and _cached(name, file, where) is None:
        require_known(name, None, where)


def missing_adapter_warning(recipe: Recipe, family: Family) -> str | None:
    """Return the warning for a distilled base model without a training adapter, or None."""
    distillation = family.distillation
    if distillation is None or recipe.model.training_adapter is not None:
        return None
    advice = "train the model that it was distilled from, if that is published"
    if distillation.training_adapter:
        advice = f"set {ADAPTER_KEY}: {distillation.training_adapter}"
    return (
        f"{recipe.model.base} is a distilled {family.spec.name}, and training breaks its distillation: "
        f"pictures become generic. To prevent it, {advice}"
    )


def _hub_file(value: str, where: str) -> tuple[str, str]:
    """Return the Hub id and the file in an adapter's name; ModelError if it names no file of the Hub."""
    parts = value.split("/")
    name, file = "/".join(parts[:2]), "/".join(parts[2:])
    if not is_hub_id(name) or (file and not file.endswith(_SUFFIX)):
        raise ModelError(
            f"the training adapter {value} does not exist",
            where=where,
            fix=f"set {ADAPTER_KEY} to a {_SUFFIX} file, or to a Hub id such as owner/name/file{_SUFFIX}",
        )
    return name, file


def _cached(name: str, file: str, where: str) -> Path | None:
    """Return the file in the newest snapshot on this machine, or None if it is not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    names = [path.relative_to(folder).as_posix() for path in folder.rglob(f"*{_SUFFIX}")]
    return folder / _chosen(names, file, name, where) if file in names or (names and not file) else None


def _downloaded(name: str, file: str, where: str, log: Log) -> Path:
    from huggingface_hub import HfApi

    with explain_download_errors(name, where):
        siblings = HfApi().model_info(name, timeout=REQUEST_TIMEOUT_S).siblings or []
        chosen = _chosen((sibling.rfilename for sibling in siblings), file, name, where)
        return download_files(name, None, [chosen], log=log) / chosen


def _chosen(names: Iterable[str], file: str, name: str, where: str) -> str:
    """Return the LoRA file of a repository: `file`, or the only one."""
    files = sorted(each for each in names if each.endswith(_SUFFIX))
    if file in files or (len(files) == 1 and not file):
        return file or files[0]
    what = f"lacks the file {file}" if file else f"has {len(files)} {_SUFFIX} files"
    listed = f": {', '.join(f'{name}/{each}' for each in files)}" if files else ""
    raise ModelError(
        f"the training adapter's repository {name} {what}",
        where=where,
        fix=f"set {ADAPTER_KEY} to one of its files{listed}",
    )
