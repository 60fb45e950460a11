"""Where the base model lies: a local folder, or a snapshot of a Hub repository.

The network is used only when a file that the model's family needs is not on this machine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import ModelError
from pipeline.models.components import local_components, resolve_components
from pipeline.models.diffusers_folder import require_whole
from pipeline.models.families import Family, FamilySpec, detect, family_spec
from pipeline.models.hub import component_files, explain_download_errors, is_hub_id
from pipeline.recipe import in_project

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

_INDEX = "model_index.json"

_CHECKPOINTS = frozenset([".safetensors", ".ckpt", ".pt", ".bin", ".gguf"])

_FOLDER_OF_A_FILE = (
    "make a folder of it once, with latentline convert-checkpoint {file} models/{name}, and set model.base "
    "to models/{name}; or name a Hub id"
)


def resolve_base(recipe: Recipe) -> Path:
    """The diffusers folder of the recipe's base model, with every file that its family needs.

    `model.base` is a local folder, relative to the project root, when one is there, and otherwise a Hub id. A
    complete snapshot on this machine is used as it is; the network is not asked for a newer one. What
    `model.components` takes from elsewhere need not be in it.

    Raises:
        ModelError: It is neither, a file is missing, or it cannot be downloaded; or `model.components` names
            one that the family does not have.
        FamilyError: Its pipeline class belongs to no family that is known.
    """
    local = _local_base(recipe)
    if local is not None:
        _require_known(recipe, family_spec(local))
        _require_complete(detect(local, resolve_components(recipe)))
        return local
    base, revision, where = recipe.model.base, recipe.model.revision, _where(recipe)
    folder = indexed_snapshot(base, revision, where)
    _require_known(recipe, family_spec(folder))
    elsewhere = resolve_components(recipe)
    whole = missing_files(folder, elsewhere) is None
    return folder if whole else _downloaded(base, revision, elsewhere, where)


def check_local_base(recipe: Recipe) -> None:
    """Nothing, where what lies on this machine does not already say that `resolve_base` will fail.

    Of a base model or a component on the Hub nothing is asked.

    Raises:
        ModelError: As `resolve_base`, of local folders.
        FamilyError: As `resolve_base`, of a local folder.
    """
    local = _local_base(recipe)
    if local is None:
        return
    _require_known(recipe, family_spec(local))
    elsewhere = local_components(recipe)
    if elsewhere.keys() == recipe.model.components.given().keys():
        _require_complete(detect(local, elsewhere))


def _where(recipe: Recipe) -> str:
    return f"{recipe.source}, model.base"


def _local_base(recipe: Recipe) -> Path | None:
    """The folder that `model.base` names; None for a Hub id.

    Raises:
        ModelError: It is neither.
    """
    base = recipe.model.base
    local = in_project(base)
    if local.is_file():
        fix = _FOLDER_OF_A_FILE.format(file=base, name=local.stem)
        raise ModelError(f"model.base {base} is a file", where=_where(recipe), fix=fix)
    if local.is_dir() and recipe.model.revision is None:
        return local
    if local.is_dir():
        raise ModelError(
            f"model.revision {recipe.model.revision} has no effect: model.base {base} is a local folder",
            where=f"{recipe.source}, model.revision",
            fix=f"remove it; or for a Hub id of that name, move {local} away",
        )
    if local.suffix.lower() in _CHECKPOINTS:
        what = f"model.base {base} is a file by its name, and does not exist"
        fix = _FOLDER_OF_A_FILE.format(file=base, name=local.stem)
        raise ModelError(what, where=f"{_where(recipe)}, looked for {local}", fix=fix)
    if not is_hub_id(base):
        raise ModelError(
            f"model.base {base} does not exist",
            where=f"{_where(recipe)}, looked for {local}",
            fix="set it to an existing diffusers folder, relative to the project root, or to a Hub id "
            "(owner/name)",
        )
    return None


def _require_known(recipe: Recipe, family: FamilySpec) -> None:
    """Nothing, when the family has every component that the recipe takes from elsewhere."""
    known = [role for role in family.components if role != "scheduler"]  # its settings are the base model's
    for role in recipe.model.components.given():
        if role not in known:
            raise ModelError(
                f"{family.name} has no component {role} that could be taken from elsewhere",
                where=f"{recipe.source}, model.components.{role}",
                fix=f"it has {', '.join(known)}",
            )


def missing_files(folder: Path, elsewhere: Mapping[str, Path] | None = None) -> str | None:
    """What the family in `folder` lacks, as one sentence; None when everything is there.

    Raises:
        FamilyError: Its pipeline class belongs to no family that is known.
    """
    try:
        _require_complete(detect(folder, elsewhere))
    except ModelError as err:
        if type(err) is not ModelError:
            raise
        return f"{err.what}: {err.where}"
    return None


def _require_complete(family: Family) -> None:
    for use in ("latents", "text", "denoiser"):
        for part in family.parts(use):
            for path in (*part.configs, *part.contents):
                if not path.is_file():
                    fix = "download the model again, or set model.base to a complete diffusers folder"
                    raise ModelError(f"the base model has no {path.name}", where=str(path), fix=fix)
                if path.suffix == ".safetensors":
                    require_whole(path)


def indexed_snapshot(base: str, revision: str | None, where: str) -> Path:
    """The snapshot of a Hub id on this machine, which may hold its index alone.

    Raises:
        ModelError: Not even that is here, and it cannot be downloaded.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    index = try_to_load_from_cache(base, _INDEX, revision=revision)
    if not isinstance(index, str):
        with explain_download_errors(base, where):
            index = hf_hub_download(base, _INDEX, revision=revision)
    return Path(index).parent


def _downloaded(base: str, revision: str | None, elsewhere: Mapping[str, Path], where: str) -> Path:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    with explain_download_errors(base, where):
        index = hf_hub_download(base, _INDEX, revision=revision)
        names = HfApi().list_repo_files(base, revision=revision)
        wanted = wanted_files(family_spec(Path(index).parent), names, without=elsewhere)
        folder = Path(snapshot_download(base, revision=revision, allow_patterns=wanted))
    missing = missing_files(folder, elsewhere)
    if missing is not None:
        fix = "use another base model, or another model.revision of it"
        raise ModelError(f"{base} is not complete on the Hub: {missing}", where=where, fix=fix)
    return folder


def wanted_files(
    family: FamilySpec, repository_files: Iterable[str], *, without: Collection[str] = ()
) -> list[str]:
    """The files of a repository that the family needs: no unused components, see `component_files`.

    Args:
        family: Says which components are used.
        repository_files: All.
        without: Components that are taken from elsewhere.
    """
    files = sorted(repository_files)
    wanted = [name for name in files if name == _INDEX]
    for component in family.components:
        if component not in without:
            wanted += component_files(files, component)
    return wanted
