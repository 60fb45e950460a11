"""Where the base model is: a local folder, or a snapshot of a Hub repository.

The network is used only if a file that the model's family needs is not on this machine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePath

from pipeline.errors import ModelError
from pipeline.log import Log, discard
from pipeline.models.components import (
    NamesModel,
    local_components,
    require_local_components,
    resolve_components,
)
from pipeline.models.diffusers_folder import INDEX_NAMES, require_whole
from pipeline.models.families import Family, FamilySpec, detect, family_spec
from pipeline.models.hub import (
    component_files,
    download_files,
    explain_download_errors,
    is_hub_id,
    require_access,
    require_known,
    require_revision,
    resembles_folder,
    snapshot_commit,
    suggest_folder,
)
from pipeline.recipe import in_project

_CONFIG_PATTERNS = ("config.json", "scheduler_config.json", "tokenizer_config.json")

_CHECKPOINT_SUFFIXES = frozenset([".safetensors", ".ckpt", ".pt", ".bin", ".gguf"])

_SINGLE_FILE_FIX = (
    "convert it once with latentline convert-checkpoint {file} models/{name}, and set model.base to "
    "models/{name}; or use a Hub id"
)

_INCOMPLETE_FIX = "download the model again, or set model.base to a complete diffusers folder"


def resolve_base(recipe: NamesModel, *, log: Log = discard) -> Path:
    """Return the diffusers folder of the recipe's base model, with every file that its family needs.

    `model.base` is a local folder, relative to the project root, if one exists, and otherwise a Hub id. A
    complete snapshot on this machine is used without a check for a newer one. Components replaced by
    `model.components` may be missing from the folder.

    Raises:
        ModelError: The base is neither a folder nor a Hub id, a file is missing or cannot be downloaded, or
            `model.components` names a component that the family does not have.
        FamilyError: The family of its pipeline class is not supported.
    """
    local = local_base(recipe)
    if local is not None:
        _require_roles(recipe, family_spec(local))
        family = detect(local, resolve_components(recipe, log=log))
        _require_complete(family)
        _require_no_pickles(recipe, family)
        return local

    base, revision, where = recipe.model.base, recipe.model.revision, _where(recipe)
    folder = indexed_snapshot(base, revision, where)
    _require_roles(recipe, family_spec(folder))
    replaced = resolve_components(recipe, log=log)
    if missing_files(folder, replaced) is not None:
        folder = _download(recipe, replaced, log)
    _require_no_pickles(recipe, detect(folder, replaced))
    return folder


def config_folder(recipe: NamesModel) -> tuple[Path, dict[str, Path]]:
    """Return the folder of the recipe's base model with at least its configuration files, some kilobytes.

    The second result has the folders of replaced components that are on this machine, by role. Components
    that are replaced by others on the Hub count as parts of the base model.

    Raises:
        ModelError: `model.base` is neither a folder nor a Hub id, or a file cannot be downloaded.
        FamilyError: The family of its pipeline class is not supported.
    """
    replaced = local_components(recipe)
    local = local_base(recipe)
    if local is not None:
        return local, replaced

    base, revision, where = recipe.model.base, recipe.model.revision, _where(recipe)
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


def check_local_base(recipe: NamesModel) -> None:
    """Raise the error of `resolve_base` if the files on this machine already show that it will fail.

    A base model or component on the Hub is not checked, unless its id resembles a local path.
    """
    local = local_base(recipe)
    if local is not None:
        _require_roles(recipe, family_spec(local))
    require_local_components(recipe)
    if local is None:
        # Without this request, a local path with a typo, such as demo/bass, would fail at its download, after
        # all images were decoded.
        base, revision = recipe.model.base, recipe.model.revision
        if resembles_folder(base) and _local_index(base, revision) is None:
            require_known(base, revision, _where(recipe))
        return
    replaced = local_components(recipe)
    if replaced.keys() == recipe.model.components.given().keys():
        family = detect(local, replaced)
        _require_complete(family)
        _require_no_pickles(recipe, family)


def missing_files(folder: Path, replaced: Mapping[str, Path] | None = None) -> str | None:
    """Return one sentence about the first missing file of a model, or None if it is complete.

    Raises:
        FamilyError: The family of its pipeline class is not supported.
    """
    try:
        _require_complete(detect(folder, replaced))
    except ModelError as err:
        # FamilyError is a ModelError too, and no download would change it.
        if type(err) is not ModelError:
            raise
        return f"{err.what}: {err.where}"
    return None


def indexed_snapshot(base: str, revision: str | None, where: str) -> Path:
    """Return the snapshot of a Hub id on this machine, which may contain nothing but its index.

    Raises:
        ModelError: The index is not on this machine and cannot be downloaded.
    """
    index = _local_index(base, revision)
    if index is None:
        with explain_download_errors(base, where):
            require_access(base, revision)
            index = _download_index(base, revision)
    return Path(index).parent


def cached_commit(base: str, revision: str | None, *, index_names: Sequence[str] = INDEX_NAMES) -> str | None:
    """Return the commit of a Hub id's snapshot on this machine; None if there is none, or it is no Hub id.

    The snapshot has at least one of `index_names`.
    """
    try:
        file = _local_index(base, revision, index_names)
    except ValueError:  # a local path that is missing
        return None
    return None if file is None else snapshot_commit(Path(file).parent)


def _local_index(base: str, revision: str | None, index_names: Sequence[str] = INDEX_NAMES) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    files = (try_to_load_from_cache(base, name, revision=revision) for name in index_names)
    return next((file for file in files if isinstance(file, str)), None)


def _download_index(base: str, revision: str | None) -> str:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    usual, modular = INDEX_NAMES
    try:
        return hf_hub_download(base, usual, revision=revision)
    except RemoteEntryNotFoundError:
        try:
            return hf_hub_download(base, modular, revision=revision)
        except RemoteEntryNotFoundError:
            pass
        raise  # the error names the usual index


def wanted_files(
    family: FamilySpec, repository_files: Iterable[str], *, without: Collection[str] = ()
) -> list[str]:
    """Return the files of a repository that a family needs, except for components in `without`."""
    files = sorted(repository_files)
    wanted = [name for name in files if name in INDEX_NAMES]
    for component in family.components:
        if component not in without:
            wanted += component_files(files, component)
    return wanted


def _where(recipe: NamesModel) -> str:
    return f"{recipe.source}, model.base"


def local_base(recipe: NamesModel) -> Path | None:
    """Return the folder named by `model.base`, or None for a Hub id.

    Raises:
        ModelError: It is neither.
    """
    base = recipe.model.base
    local = in_project(base)
    single_file_fix = _SINGLE_FILE_FIX.format(file=base, name=local.stem)
    if local.is_file():
        raise ModelError(f"model.base {base} is a file", where=_where(recipe), fix=single_file_fix)

    if local.is_dir() and recipe.model.revision is None:
        return local
    if local.is_dir():
        raise ModelError(
            f"model.revision {recipe.model.revision} requires a Hub repository, but model.base {base} is a "
            "local folder",
            where=f"{recipe.source}, model.revision",
            fix=f"remove model.revision; to use the Hub repository {base} instead, rename the folder {local}",
        )

    expected = f"{_where(recipe)}, expected at {local}"
    if local.suffix.lower() in _CHECKPOINT_SUFFIXES:
        what = f"model.base {base} has the name of a file and does not exist"
        raise ModelError(what, where=expected, fix=single_file_fix)
    if not is_hub_id(base):
        similar_folder = suggest_folder(base)
        fix = "use an existing diffusers folder, relative to the project root, or a Hub id (owner/name)"
        if similar_folder is not None:
            fix = f"did you mean {similar_folder}?"
        raise ModelError(f"model.base {base} does not exist", where=expected, fix=fix)
    require_revision(recipe.model.revision, f"{recipe.source}, model.revision")
    return None


def _require_roles(recipe: NamesModel, family: FamilySpec) -> None:
    # The scheduler's settings always come from the base model.
    roles = [role for role in family.components if role != "scheduler"]
    for role in recipe.model.components.given():
        if role not in roles:
            raise ModelError(
                f"{family.name} has no replaceable component {role}",
                where=f"{recipe.source}, model.components.{role}",
                fix=f"use one of {', '.join(roles)}",
            )


def _require_complete(family: Family) -> None:
    for use in ("latents", "text", "denoiser"):
        for part in family.fingerprint_parts(use):
            for path in (*part.configs, *part.contents):
                if not path.is_file():
                    what = f"the base model has no {path.name}"
                    raise ModelError(what, where=str(path), fix=_INCOMPLETE_FIX)
                if path.suffix == ".safetensors":
                    require_whole(path)


def _require_no_pickles(recipe: NamesModel, family: Family) -> None:
    files = (
        path
        for use in ("latents", "text", "denoiser")
        for part in family.fingerprint_parts(use)
        for path in part.contents
    )
    pickled = next((path for path in files if _is_pickle(path)), None)
    if pickled is not None and not recipe.model.allow_pickle:
        raise _pickle_error(str(pickled))


def _is_pickle(path: PurePath) -> bool:
    # Also for the index of shards, pytorch_model.bin.index.json.
    return ".bin" in path.suffixes


def _pickle_error(where: str) -> ModelError:
    what = "weights of the base model must be *.safetensors, got a pickle, which can run code when it is read"
    fix = (
        "use a model or model.revision with safetensors, or save it with save_pretrained(..., "
        "safe_serialization=True); or set model.allow_pickle: true if you trust its author"
    )
    return ModelError(what, where=where, fix=fix)


def _download(recipe: NamesModel, replaced: Mapping[str, Path], log: Log) -> Path:
    from huggingface_hub import HfApi

    base, revision, where = recipe.model.base, recipe.model.revision, _where(recipe)
    with explain_download_errors(base, where):
        require_access(base, revision)
        index = _download_index(base, revision)
        names = HfApi().list_repo_files(base, revision=revision)
        wanted = wanted_files(family_spec(Path(index).parent), names, without=replaced)

        # Before the download, which may take hours.
        pickled = next((name for name in wanted if _is_pickle(PurePath(name))), None)
        if pickled is not None and not recipe.model.allow_pickle:
            raise _pickle_error(f"{where}: {base}, file {pickled}")
        folder = download_files(base, revision, wanted, log=log)

    missing = missing_files(folder, replaced)
    if missing is not None:
        fix = "use another base model, or another model.revision of it"
        raise ModelError(f"{base} is incomplete on the Hub: {missing}", where=where, fix=fix)
    return folder
