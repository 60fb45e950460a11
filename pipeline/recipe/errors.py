"""Mistakes in a YAML file, each with its place, and the error that lists all of them."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pipeline.errors import LatentlineError, RecipeError
from pipeline.recipe.error_descriptions import FileKind, InvalidValue, describe
from pipeline.recipe.keys import KIND, child, without_kinds
from pipeline.recipe.other_trainers import term_of
from pipeline.recipe.schema import RecipeFile
from pipeline.recipe.settings import VIOLATION, Violation
from pipeline.recipe.yaml_document import KeyPath, dotted

Error = TypeVar("Error", bound=LatentlineError)


@dataclass(frozen=True)
class Mistake:
    """One mistake in a YAML file, at the key `path`."""

    path: KeyPath
    what: str
    fix: str


@dataclass(frozen=True)
class PlacedMistake:
    """A mistake with its place in a file.

    Attributes:
        file: The file, as shown in messages.
        line: Line, counted from 1; None for a mistake of the complete file, or without a file.
    """

    file: str
    mistake: Mistake
    line: int | None = None

    @property
    def where(self) -> str:
        """File, line and key, such as `configs/flowers.yaml:14, buckets.resolution`."""
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}, {dotted(self.mistake.path)}" if self.mistake.path else place


def _recipe_key_fix(path: KeyPath) -> str | None:
    if (term := term_of(str(path[-1]))) is not None:
        return term.fix
    if path == ("name",):
        return "remove it: the name of a recipe is the name of its file without .yaml"
    return None


RECIPE = FileKind(
    name="recipe",
    model=RecipeFile,
    first_key="datasets",
    example="a recipe in configs/, such as demo.yaml",
    schema="configs/recipe.schema.json",
    unknown_key_fix=_recipe_key_fix,
)


def find_mistakes(data: Any, kind: FileKind = RECIPE) -> list[Mistake]:
    """Return all mistakes in the `data` of a file."""
    errors = _validation_errors(data, kind)
    invalid = {error.path for error in errors}
    mistakes = [mistake for error in errors for mistake in _mistakes(error, set())]

    # Pydantic compares keys with one another only if each is valid by itself. So a second pass validates the
    # data without the invalid keys, and adds mistakes about keys that were valid.
    if invalid:
        for error in _validation_errors(_without(data, invalid), kind):
            if error.path not in invalid:
                mistakes += _mistakes(error, invalid)
    return list(dict.fromkeys(mistakes))


def recipe_error(placed: list[PlacedMistake]) -> RecipeError:
    """Return one error that lists every mistake in recipes; see `file_error`."""
    return file_error(placed, RecipeError, RECIPE)


def file_error(placed: list[PlacedMistake], error: type[Error], kind: FileKind) -> Error:
    """Return one error that lists every mistake (at least one) with its place and fix."""
    errors = [error(one.mistake.what, where=one.where, fix=one.mistake.fix) for one in placed]
    if len(errors) == 1:
        return errors[0]

    files = list(dict.fromkeys(one.file for one in placed))
    where = files[0] if len(files) == 1 else f"{len(files)} {kind.name}s"
    return error(_listed(errors, where), where="\n".join(files), fix=_all_fixes(errors))


def combined_error(errors: Sequence[LatentlineError], *, file: str) -> LatentlineError:
    """Return the only error, or one RecipeError that lists all errors of the recipe in `file`."""
    if len(errors) == 1:
        return errors[0]
    return RecipeError(_listed(errors, file), where=file, fix=_all_fixes(errors))


def _listed(errors: Sequence[LatentlineError], where: str) -> str:
    listed = "\n\n".join(textwrap.indent(each.text(), "  ") for each in errors)
    return f"{len(errors)} mistakes in {where}\n\n{listed}\n"


def _all_fixes(errors: Sequence[LatentlineError]) -> str:
    return f"apply the {len(errors)} fixes above"


def _validation_errors(data: Any, kind: FileKind) -> list[InvalidValue]:
    try:
        # From JSON, because strict mode accepts a list for a tuple only there.
        kind.model.model_validate_json(json.dumps(data))
    except ValidationError as error:
        # Pydantic also reports a list as too short if its only items are invalid.
        return [
            _placed_error(each, data, kind)
            for each in error.errors(include_url=False)
            if not (each["type"] == "too_short" and each["input"])
        ]
    return []


def _placed_error(error: ErrorDetails, data: Any, kind: FileKind) -> InvalidValue:
    path = without_kinds(kind.model, error["loc"], data)
    value, context = error["input"], error.get("ctx", {})
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        # Pydantic reports the section, although one of its keys is wrong.
        path, value = (*path, KIND), child(value, KIND)
    return InvalidValue(kind, data, path, error["type"], value, context)


def _without(data: Any, paths: Iterable[KeyPath]) -> Any:
    # List items stay, because other mistakes name items by their indices.
    copy = json.loads(json.dumps(data))
    for path in paths:
        holder = copy
        for part in path[:-1]:
            holder = child(holder, part)
        if path and isinstance(holder, dict):
            holder.pop(path[-1], None)
    return copy


def _mistakes(error: InvalidValue, invalid: set[KeyPath]) -> Iterator[Mistake]:
    # A violation that compares an invalid key may disappear with the correction of that key.
    if error.type == VIOLATION:
        violations: list[Violation] = error.context["violations"]
        for violation in violations:
            if invalid.isdisjoint((*error.path, key) for key in violation.involves):
                yield Mistake((*error.path, *_parts(violation.key)), violation.what, violation.fix)
        return
    what, fix = describe(error)
    yield Mistake(error.path, what, fix)


def _parts(key: str) -> KeyPath:
    """Return `[1].name` as (1, "name")."""
    pieces = key.replace("[", ".").replace("]", "").split(".")
    return tuple(int(piece) if piece.isdigit() else piece for piece in pieces if piece)
