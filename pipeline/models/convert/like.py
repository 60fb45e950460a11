"""The model that a single file is made from: its configurations, and the parts that the file lacks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from pipeline.errors import ModelError
from pipeline.models.diffusers_folder import tokenizer_files, weight_files
from pipeline.models.families import Family, detect
from pipeline.models.hub import component_files, explain_download_errors, is_hub_id
from pipeline.models.resolve import indexed_snapshot

WHERE = "--like"

_WEIGHTS = (".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json")


def family_in(folder: Path) -> Family:
    """The family of a diffusers folder.

    Raises:
        FamilyError: As `detect`.
        ModelError: As `detect`.
    """
    return detect(folder)


def resolve_like(like: str, whole: Collection[str] | None) -> Family:
    """The family in the folder that `like` names, with all files that are needed of it.

    A local folder is taken as it is. Of a Hub id a snapshot on this machine is, if it has them; otherwise
    they are downloaded, without the weights of components that are not in `whole`.

    Args:
        like: A diffusers folder, relative to the working directory, or owner/name, or owner/name@revision.
        whole: Components whose weights are needed; None: all that the model has.

    Raises:
        ModelError: It is neither, or a file is missing.
        FamilyError: Its pipeline class belongs to no family that is known.
    """
    local = Path(like).expanduser()
    if local.is_dir():
        family = family_in(local.resolve())
        _require(family, whole)
        return family
    name, _, revision = like.partition("@")
    if not is_hub_id(name):
        fix = "name an existing diffusers folder, or a Hub id (owner/name)"
        raise ModelError(f"{like} does not exist", where=f"{WHERE}, looked for {local.absolute()}", fix=fix)
    family = family_in(indexed_snapshot(name, revision or None, WHERE))
    try:
        _require(family, whole)
    except ModelError:
        family = _downloaded(name, revision or None, whole)
        _require(family, whole)
    return family


def _require(family: Family, whole: Collection[str] | None) -> None:
    """Nothing, when every component has its configuration, and those of `whole` their weights.

    Raises:
        ModelError: A file is missing.
    """
    for role in present_roles(family):
        place = family.place(role)
        if role.startswith("tokenizer"):
            if whole is None or role in whole:
                tokenizer_files(place)
            continue
        name = "scheduler_config.json" if role == "scheduler" else "config.json"
        if not (place / name).is_file():
            fix = f"name a complete diffusers folder or a Hub id in {WHERE}"
            raise ModelError(f"the model has no {role}/{name}", where=str(place), fix=fix)
        if role != "scheduler" and (whole is None or role in whole):
            weight_files(place)


def present_roles(family: Family) -> tuple[str, ...]:
    """The components that the model has, among those that its family uses."""
    index = family.index
    return tuple(role for role in family.components if (index.get(role) or [None])[0] is not None)


def is_component(said: object) -> bool:
    """Whether an entry of `model_index.json` names a component: its library and its class, or neither."""
    match said:
        case [str() | None, str() | None]:
            return True
        case _:
            return False


def _downloaded(name: str, revision: str | None, whole: Collection[str] | None) -> Family:
    from huggingface_hub import HfApi, snapshot_download

    with explain_download_errors(name, WHERE):
        folder = indexed_snapshot(name, revision, WHERE)
        files = HfApi().list_repo_files(name, revision=revision)
        wanted = wanted_files(present_roles(family_in(folder)), files, whole)
        return family_in(Path(snapshot_download(name, revision=revision, allow_patterns=wanted)))


def wanted_files(roles: Iterable[str], files: Iterable[str], whole: Collection[str] | None) -> list[str]:
    """Those of a repository's files that are needed.

    Args:
        roles: Components of the model.
        files: All of the repository.
        whole: As of `resolve_like`.
    """
    known = sorted(files)
    wanted = ["model_index.json"]
    for role in roles:
        inside = component_files(known, role)
        keep = whole is None or role in whole
        wanted += inside if keep else [each for each in inside if not each.endswith(_WEIGHTS)]
    return wanted


def files_of(folder: Path) -> list[Path]:
    """The files of one component in a local folder that a load of it reads."""
    names = [each.name for each in folder.iterdir() if each.is_file()]
    return [folder / name for name in component_files(names, "")]
