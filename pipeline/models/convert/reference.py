"""The reference model of a conversion, which provides configurations and missing components."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from pipeline.errors import ModelError
from pipeline.models.diffusers_folder import INDEX_NAMES, is_tokenizer, tokenizer_files, weight_files
from pipeline.models.families import Family, detect
from pipeline.models.hub import component_files, explain_download_errors, is_hub_id
from pipeline.models.resolve import indexed_snapshot
from pipeline.storage.addresses import expanded

WHERE = "--like"
"""Command-line option that names the reference model."""

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json")


def resolve_reference(reference: str, weights_of: Collection[str] | None, *, where: str = WHERE) -> Family:
    """Return the family of the reference model, with all files that the conversion needs.

    The reference is a diffusers folder, relative to the working directory, or owner/name, or
    owner/name@revision. Files that are missing in a snapshot are downloaded. `weights_of` has the components
    that need their weights; None means all.

    Raises:
        ModelError: The reference is neither a folder nor a Hub id, or a file is missing.
        FamilyError: The family of its pipeline class is not supported.
    """
    local = expanded(reference)
    if local.is_dir():
        family = detect(local.resolve())
        _require_files(family, weights_of, where)
        return family

    name, _, revision = reference.partition("@")
    if not is_hub_id(name):
        what, place = f"{reference} does not exist", f"{where}, expected at {local.absolute()}"
        raise ModelError(what, where=place, fix="use an existing diffusers folder, or a Hub id (owner/name)")

    family = detect(indexed_snapshot(name, revision or None, where))
    try:
        _require_files(family, weights_of, where)
    except ModelError:
        family = _download(name, revision or None, weights_of, where)
        _require_files(family, weights_of, where)
    return family


def present_roles(family: Family) -> tuple[str, ...]:
    """Return the components used by the family that the model contains."""
    index = family.model.index
    return tuple(role for role in family.spec.components if (index.get(role) or [None])[0] is not None)


def is_component(entry: object) -> bool:
    """Return True if an entry of `model_index.json` is a component: [library, class] or [null, null]."""
    match entry:
        case [str() | None, str() | None]:
            return True
        case _:
            return False


def wanted_files(roles: Iterable[str], files: Iterable[str], weights_of: Collection[str] | None) -> list[str]:
    """Return the files of a repository that the conversion needs; see `resolve_reference`."""
    all_files = sorted(files)
    wanted = [name for name in all_files if name in INDEX_NAMES]
    for role in roles:
        needs_weights = weights_of is None or role in weights_of
        role_files = component_files(all_files, role)
        wanted += [name for name in role_files if needs_weights or not name.endswith(_WEIGHT_SUFFIXES)]
    return wanted


def local_component_files(folder: Path) -> list[Path]:
    """Return the files of a component in a local folder that are read when it is loaded."""
    names = [path.name for path in folder.iterdir() if path.is_file()]
    return [folder / name for name in component_files(names, "")]


def _require_files(family: Family, weights_of: Collection[str] | None, where: str) -> None:
    for role in present_roles(family):
        folder = family.model.component(role)
        needs_weights = weights_of is None or role in weights_of
        if is_tokenizer(role):
            if needs_weights:
                tokenizer_files(folder)
            continue

        name = "scheduler_config.json" if role == "scheduler" else "config.json"
        if not (folder / name).is_file():
            fix = f"set {where} to a complete diffusers folder or a Hub id"
            raise ModelError(f"the model has no {role}/{name}", where=str(folder), fix=fix)
        if role != "scheduler" and needs_weights:
            weight_files(folder)


def _download(name: str, revision: str | None, weights_of: Collection[str] | None, where: str) -> Family:
    from huggingface_hub import HfApi, snapshot_download

    with explain_download_errors(name, where):
        snapshot = indexed_snapshot(name, revision, where)
        files = HfApi().list_repo_files(name, revision=revision)
        wanted = wanted_files(present_roles(detect(snapshot)), files, weights_of)
        return detect(Path(snapshot_download(name, revision=revision, allow_patterns=wanted)))
