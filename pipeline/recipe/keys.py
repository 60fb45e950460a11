"""Which keys a recipe has, read from its models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipeline.recipe.locate import KeyPath
from pipeline.recipe.schema import RecipeFile


def section_at(path: KeyPath) -> type[BaseModel] | None:
    """The model of the section at `path`."""
    if not path:
        return RecipeFile
    info = field_at(path)
    return None if info is None else model_in(info.annotation)


def field_at(path: KeyPath) -> FieldInfo | None:
    """The `FieldInfo` of the key at `path`; None for an unknown key."""
    model: type[BaseModel] | None = RecipeFile
    info = None
    for part in path:
        if isinstance(part, int):
            continue
        info = None if model is None else keys_of(model).get(part)
        model = None if info is None else model_in(info.annotation)
    return info


def keys_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of `model` by the key that the YAML uses."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The model that `annotation` is, or that its items are."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def all_keys(model: type[BaseModel] = RecipeFile, above: str = "") -> Iterator[str]:
    """Every key below `model`, dotted, each section before its own keys."""
    for key, info in keys_of(model).items():
        yield f"{above}{key}"
        below = model_in(info.annotation)
        if below is not None:
            yield from all_keys(below, f"{above}{key}.")
