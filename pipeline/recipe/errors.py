"""Mistakes in a recipe: pydantic's errors as messages with the key, the value and a fix."""

from __future__ import annotations

import difflib
import json
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pipeline.errors import RecipeError, counted
from pipeline.recipe.other_trainers import term_of
from pipeline.recipe.schema import RecipeFile, all_keys, field_at, keys_of, section_at
from pipeline.recipe.settings import MAX_COUNT, VIOLATION, Violation, one_of
from pipeline.recipe.yaml_document import KeyPath, dotted

MAX_SHOWN_CHARACTERS = 80
"""Maximum length of a value in a message."""

WhatAndFix = tuple[str, str]


@dataclass(frozen=True)
class Mistake:
    """One mistake in a recipe.

    Attributes:
        path: The key at fault.
        what: Description of the mistake, with the value.
        fix: What to write instead.
    """

    path: KeyPath
    what: str
    fix: str


@dataclass(frozen=True)
class PlacedMistake:
    """A mistake with its place in a file.

    Attributes:
        file: The recipe's file, as shown in messages.
        mistake: The mistake.
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


def find_mistakes(data: Any) -> list[Mistake]:
    """Return all mistakes in the `data` of a recipe file.

    Pydantic compares keys with one another only if each is valid by itself. So a second pass validates the
    data without the invalid keys, and adds mistakes about keys that were valid.
    """
    errors = _validation_errors(data)
    invalid = {error["loc"] for error in errors}
    mistakes = [mistake for error in errors for mistake in _mistakes(error, set())]
    if invalid:
        for error in _validation_errors(_without(data, invalid)):
            if error["loc"] not in invalid:
                mistakes += _mistakes(error, invalid)
    return list(dict.fromkeys(mistakes))


def recipe_error(placed: list[PlacedMistake]) -> RecipeError:
    """Return one error that lists every mistake with its place and fix.

    Args:
        placed: At least one mistake.
    """
    errors = [RecipeError(one.mistake.what, where=one.where, fix=one.mistake.fix) for one in placed]
    if len(errors) == 1:
        return errors[0]

    listed = "\n\n".join(textwrap.indent(error.text(), "  ") for error in errors)
    files = list(dict.fromkeys(one.file for one in placed))
    where = files[0] if len(files) == 1 else f"{len(files)} recipes"
    return RecipeError(
        f"{len(errors)} mistakes in {where}\n\n{listed}\n",
        where="\n".join(files),
        fix=f"apply the {len(errors)} fixes above",
    )


def _validation_errors(data: Any) -> list[ErrorDetails]:
    try:
        # From JSON, because strict mode accepts a list for a tuple only there.
        RecipeFile.model_validate_json(json.dumps(data))
    except ValidationError as error:
        # Pydantic also reports a list as too short if its only items are invalid.
        return [
            each
            for each in error.errors(include_url=False)
            if not (each["type"] == "too_short" and each["input"])
        ]
    return []


def _without(data: Any, paths: Iterable[KeyPath]) -> Any:
    """Return a copy of `data` without the mapping keys at `paths`; list items stay, to keep their indices."""
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


def _mistakes(error: ErrorDetails, invalid: set[KeyPath]) -> Iterator[Mistake]:
    """Yield the mistakes of an error, without violations that compare an invalid key."""
    path = error["loc"]
    if error["type"] == VIOLATION:
        violations: list[Violation] = error.get("ctx", {})["violations"]
        for violation in violations:
            if invalid.isdisjoint((*path, key) for key in violation.involves):
                yield Mistake((*path, *_parts(violation.key)), violation.what, violation.fix)
        return
    describe = _DESCRIPTIONS.get(error["type"], _other)
    what, fix = describe(path, error["input"], error.get("ctx", {}))
    yield Mistake(path, what, fix)


def _parts(key: str) -> KeyPath:
    """Return `[1].name` as (1, "name")."""
    pieces = key.replace("[", ".").replace("]", "").split(".")
    return tuple(int(piece) if piece.isdigit() else piece for piece in pieces if piece)


def _unknown_key(path: KeyPath, _value: Any, _context: dict[str, Any]) -> WhatAndFix:
    key = str(path[-1])
    what = f"unknown key {key}"
    if (term := term_of(key)) is not None:
        return what, term.fix

    if path == ("name",):
        return what, "remove it: the name of a recipe is the name of its file without .yaml"

    section = section_at(path[:-1])
    section_keys = list(keys_of(section)) if section is not None else []
    if close := difflib.get_close_matches(key, section_keys, n=1):
        return what, f"did you mean {close[0]}?"
    if same_name := [full for full in all_keys() if full.rpartition(".")[2] == key]:
        # Keys of few sections come first, because they are used more often.
        same_name.sort(key=lambda full: full.count("."))
        return what, f"write it as {one_of(same_name)}, or remove it"
    name = dotted(path[:-1]) or "a recipe"
    return what, f"remove it; the keys of {name} are {', '.join(section_keys)}"


def _missing(path: KeyPath, _value: Any, _context: dict[str, Any]) -> WhatAndFix:
    info = field_at(path)
    meaning = f": {info.description}" if info is not None and info.description else ""
    return f"required key {path[-1]} is missing", f"add {path[-1]}{meaning}"


def _wrong_type(expected: str) -> Callable[[KeyPath, Any, dict[str, Any]], WhatAndFix]:
    def describe(path: KeyPath, value: Any, _context: dict[str, Any]) -> WhatAndFix:
        return f"{_name(path)} must be {expected}, got {_shown(value)}", _type_fix(path, value, expected)

    return describe


_BOOLEAN_WORDS = {
    **dict.fromkeys(("true", "yes", "on"), "true"),
    **dict.fromkeys(("false", "no", "off"), "false"),
}


def _type_fix(path: KeyPath, value: Any, expected: str) -> str:
    section = section_at(path)
    if expected == "true or false" and isinstance(value, str) and value.lower() in _BOOLEAN_WORDS:
        fix = f"write {_BOOLEAN_WORDS[value.lower()]}, without quotes"
    elif expected == "text" and isinstance(value, int | float):
        fix = f"put it in quotes: {json.dumps(json.dumps(value))}"
    elif expected in ("an integer", "a number") and isinstance(value, str) and _is_number(value):
        fix = f"write {value}, without quotes"
    elif expected == "a list" and isinstance(value, dict) and value:
        first = next(iter(cast("dict[str, Any]", value)))
        fix = f"make it a list item: put a dash before its first key, - {first}: ..., and indent the rest"
    elif expected == "a list":
        # A scalar is most likely the only item of the intended list.
        item = json.dumps(value, ensure_ascii=False) if isinstance(value, str | int | float) else "..."
        key = next(part for part in reversed(path) if isinstance(part, str))
        fix = f"write a list: {key}: [{item}]"
    elif expected == "a section of keys" and section is not None:
        fix = f"indent keys below it; its keys are {', '.join(keys_of(section))}"
    else:
        example = _example(path)
        fix = f"write {expected}" + (f", such as {_plain(example)}" if example is not None else "")
    return fix


def _example(path: KeyPath) -> bool | int | float | str | None:
    """Return the default or the first documented example of the key, if it is a scalar."""
    info = field_at(path)
    if info is None:
        return None
    candidates = [info.default, *(info.examples or [])]
    return next((each for each in candidates if isinstance(each, bool | int | float | str)), None)


def _out_of_range(path: KeyPath, value: Any, context: dict[str, Any]) -> WhatAndFix:
    limits = _declared_limits(path) or context
    # A user who wrote 0 steps need not know the limit that catches typing errors.
    if "ge" in context and limits.get("le") == MAX_COUNT:
        limits = context
    required = _range(limits)
    return f"{_name(path)} must be {required}, got {_shown(value)}", f"use a value {required}"


def _declared_limits(path: KeyPath) -> dict[str, Any]:
    """Return the limits (gt, ge, lt, le) that the schema declares for a key; empty for items of lists."""
    info = field_at(path)
    if info is None or not isinstance(path[-1], str):
        return {}
    names = ("gt", "ge", "lt", "le")
    return {name: getattr(each, name) for each in info.metadata for name in names if hasattr(each, name)}


def _range(limits: dict[str, Any]) -> str:
    if "ge" in limits and "le" in limits:
        return f"between {_limit(limits['ge'])} and {_limit(limits['le'])}"
    words = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}
    return " and ".join(f"{words[name]} {_limit(limits[name])}" for name in words if name in limits)


def _limit(limit: float) -> str:
    """Return the limit of a range as text: 1 for 1.0, 1000000000 for an integer."""
    return f"{limit:g}" if isinstance(limit, float) else str(limit)


def _not_a_choice(path: KeyPath, value: Any, _context: dict[str, Any]) -> WhatAndFix:
    info = field_at(path)
    choices = [] if info is None else list(_choices(info.annotation))
    close = difflib.get_close_matches(str(value), choices, n=1)
    what = f"{_name(path)} must be {one_of(choices)}, got {_shown(value)}"
    return what, f"did you mean {close[0]}?" if close else f"use {one_of(choices)}"


def _choices(annotation: Any) -> Iterator[str]:
    """Yield the values of the literal types in `annotation`, which may be a list of literals or optional."""
    for argument in get_args(annotation):
        if get_origin(annotation) is Literal:
            yield str(argument)
        else:
            yield from _choices(argument)


def _bad_name(path: KeyPath, value: Any, _context: dict[str, Any]) -> WhatAndFix:
    what = f"{_name(path)} must contain only letters, digits, _ and -, got {_shown(value)}"
    return what, "use only A-Z, a-z, 0-9, _ and -"


def _not_finite(path: KeyPath, value: Any, _context: dict[str, Any]) -> WhatAndFix:
    return f"{_name(path)} must be a finite number, got {_shown(value)}", "write a number"


def _too_short(path: KeyPath, _value: Any, context: dict[str, Any]) -> WhatAndFix:
    least = counted(context.get("min_length", 1), "item or character", "items or characters")
    return f"{_name(path)} must not be empty", f"write at least {least}, or remove the key if it is optional"


def _too_long(path: KeyPath, value: Any, context: dict[str, Any]) -> WhatAndFix:
    most = context.get("max_length", "fewer")
    return f"{_name(path)} must have at most {most} values, got {_shown(value)}", f"write {most} values"


def _other(path: KeyPath, value: Any, context: dict[str, Any]) -> WhatAndFix:
    reason = context.get("error", "invalid value")
    return (
        f"{_name(path)} is not valid ({reason}), got {_shown(value)}",
        "see the key's description in configs/recipe.schema.json",
    )


_DESCRIPTIONS: dict[str, Callable[[KeyPath, Any, dict[str, Any]], WhatAndFix]] = {
    "extra_forbidden": _unknown_key,
    "missing": _missing,
    "literal_error": _not_a_choice,
    "string_pattern_mismatch": _bad_name,
    "finite_number": _not_finite,
    "too_short": _too_short,
    "string_too_short": _too_short,
    "too_long": _too_long,
    "bool_type": _wrong_type("true or false"),
    "int_type": _wrong_type("an integer"),
    "int_from_float": _wrong_type("an integer"),
    "int_parsing_size": _wrong_type("an integer of at most 18 digits"),
    "float_type": _wrong_type("a number"),
    "string_type": _wrong_type("text"),
    "path_type": _wrong_type("text"),
    "tuple_type": _wrong_type("a list"),
    "model_type": _wrong_type("a section of keys"),
    "model_attributes_type": _wrong_type("a section of keys"),
    **dict.fromkeys(("greater_than", "greater_than_equal", "less_than", "less_than_equal"), _out_of_range),
}
"""Descriptions by pydantic's error type."""


def _name(path: KeyPath) -> str:
    return dotted(path) or "the recipe"


def _shown(value: Any) -> str:
    """Return `value` as YAML shows it, text in quotes, shortened if it is long."""
    if value is None:
        return "an empty value"
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else _plain(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[: MAX_SHOWN_CHARACTERS - 3]}..."


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
