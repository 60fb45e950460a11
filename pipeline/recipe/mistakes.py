"""What a recipe's author reads: pydantic's errors in the words of YAML, each with what, where and fix."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pipeline.errors import RecipeError
from pipeline.recipe.locate import KeyPath, dotted
from pipeline.recipe.rules import BROKEN, Broken
from pipeline.recipe.schema import RecipeFile
from pipeline.recipe.words import describe


@dataclass(frozen=True)
class Mistake:
    """One thing wrong with a recipe.

    Attributes:
        path: The key meant.
        what: What is wrong, with the value met.
        fix: What to write instead.
    """

    path: KeyPath
    what: str
    fix: str


@dataclass(frozen=True)
class PlacedMistake:
    """A mistake as a person looks it up.

    Attributes:
        file: The recipe's file as messages name it.
        mistake: What is wrong there.
        line: From 1; None where the file as a whole is meant, or there is no file.
    """

    file: str
    mistake: Mistake
    line: int | None = None

    @property
    def where(self) -> str:
        """`configs/flowers.yaml:14, buckets.resolution`, or as much of it as is known."""
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}, {dotted(self.mistake.path)}" if self.mistake.path else place


def find_mistakes(data: Any) -> list[Mistake]:
    """All that is wrong with a recipe's `data`, as `RecipeFile` sees it; empty when nothing is.

    pydantic compares keys with each other only where each is right by itself, so a second look follows with
    unknown keys left out and wrong optional values at their defaults. What it then finds about keys that were
    wrong is not repeated.
    """
    first = _errors(data)
    wrong = {_path(error) for error in first}
    found = [mistake for error in first for mistake in _mistakes(error)]
    if wrong:
        for error in _errors(_without(data, wrong)):
            path = _path(error)
            compares = {(*path, key) for key in error.get("ctx", {}).get("involves", ())}
            if path not in wrong and not compares & wrong:
                found += _mistakes(error)
    return list(dict.fromkeys(found))


def recipe_error(placed: list[PlacedMistake]) -> RecipeError:
    """One error that lists every mistake of `placed` (at least one), each with where and fix."""
    errors = [RecipeError(one.mistake.what, where=one.where, fix=one.mistake.fix) for one in placed]
    if len(errors) == 1:
        return errors[0]
    listed = "\n\n".join(textwrap.indent(error.text(), "  ") for error in errors)
    files = list(dict.fromkeys(one.file for one in placed))
    holder = files[0] if len(files) == 1 else f"{len(files)} recipes"
    return RecipeError(
        f"{len(errors)} mistakes in {holder}\n\n{listed}\n",
        where="\n".join(files),
        fix=f"correct all {len(errors)}, each as its own fix says",
    )


def _errors(data: Any) -> list[ErrorDetails]:
    try:
        RecipeFile.model_validate_json(json.dumps(data))
    except ValidationError as error:
        return [each for each in error.errors(include_url=False) if not _echoes(each)]
    return []


def _echoes(error: ErrorDetails) -> bool:
    """Whether `error` calls a list empty whose items are wrong; pydantic reports those as well."""
    return error["type"] == "too_short" and bool(error["input"])


def _path(error: ErrorDetails) -> KeyPath:
    return tuple(error["loc"])


def _without(data: Any, paths: Iterable[KeyPath]) -> Any:
    """A copy of `data` without the mapping keys at `paths`; list items stay, so that indices hold."""
    copy = json.loads(json.dumps(data))
    for path in paths:
        holder = copy
        for part in path[:-1]:
            holder = _child(holder, part)
        if path and isinstance(holder, dict):
            holder.pop(path[-1], None)
    return copy


def _child(holder: Any, part: str | int) -> Any:
    if isinstance(holder, dict):
        return holder.get(part)
    if isinstance(holder, list) and isinstance(part, int) and part < len(holder):
        return holder[part]
    return None


def _mistakes(error: ErrorDetails) -> Iterator[Mistake]:
    path = _path(error)
    if error["type"] == BROKEN:
        broken: list[Broken] = error.get("ctx", {})["broken"]
        for rule in broken:
            yield Mistake((*path, *_parts(rule.key)), rule.what, rule.fix)
        return
    what, fix = describe(error)
    yield Mistake(path, what, fix)


def _parts(key: str) -> KeyPath:
    """`[1].name` as (1, "name")."""
    pieces = key.replace("[", ".").replace("]", "").split(".")
    return tuple(int(piece) if piece.isdigit() else piece for piece in pieces if piece)
