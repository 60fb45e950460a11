"""The keys of a YAML file, looked up in the pydantic models that validate it.

A section may be a union of models that differ in a key `kind`. The data then decide which model applies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipeline.recipe.yaml_document import KeyPath

KIND = "kind"
"""Key by which the models of a union differ."""


def keys_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of `model` by the key used in YAML."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def all_keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted name of every key below `model`, each section before its own keys.

    Keys that several models of a union share are yielded once per model.
    """
    for key, info in keys_of(model).items():
        yield f"{prefix}{key}"
        for section in sections_in(info.annotation):
            yield from all_keys_of(section, f"{prefix}{key}.")


def field_below(model: type[BaseModel], path: KeyPath, data: Any = None) -> FieldInfo | None:
    """Return the field of the key at `path` below the file's `model`, or None for an unknown key.

    `data` is the content of the file, which selects the models of unions.
    """
    return _found(model, path, data)[0]


def section_below(model: type[BaseModel], path: KeyPath, data: Any = None) -> type[BaseModel] | None:
    """Return the model of the section at `path`, or None if there is no such section; see `field_below`."""
    return _found(model, path, data)[1]


def without_kinds(model: type[BaseModel], location: KeyPath, data: Any) -> KeyPath:
    """Return the key path of pydantic's `location`, which names the chosen kind after the key of a union."""
    path: KeyPath = ()
    parts = iter(location)
    for part in parts:
        path = (*path, part)
        info = field_below(model, path, data)
        if info is not None and len(list(sections_in(info.annotation))) > 1:
            next(parts, None)
    return path


def child(holder: Any, part: str | int) -> Any:
    """Return the value at a key or index of a mapping or list, or None."""
    if isinstance(holder, dict):
        return cast("dict[Any, Any]", holder).get(part)
    if isinstance(holder, list) and isinstance(part, int) and part < len(holder):
        return cast("list[Any]", holder)[part]
    return None


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models that `annotation` is, or that are the types of its items, annotated or not."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    for argument in get_args(annotation):
        yield from sections_in(argument)


def _found(
    model: type[BaseModel], path: KeyPath, data: Any
) -> tuple[FieldInfo | None, type[BaseModel] | None]:
    """Return the field at `path`, and the model of the section there."""
    info: FieldInfo | None = None
    section: type[BaseModel] | None = model
    for part in path:
        data = child(data, part)
        # The field of a list is also the field of its items.
        if isinstance(part, str):
            info = None if section is None else keys_of(section).get(part)
        section = None if info is None else _section(info, data)
    return info, section


def _section(info: FieldInfo, data: Any) -> type[BaseModel] | None:
    sections = list(sections_in(info.annotation))
    if len(sections) <= 1:
        return sections[0] if sections else None
    kind = child(data, KIND)
    return next((each for each in sections if kind in get_args(keys_of(each)[KIND].annotation)), None)
