"""Descriptions of pydantic's errors: the key, the value and a fix, in the terms of the YAML file."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipeline.errors import counted
from pipeline.recipe.keys import KIND, all_keys_of, field_below, keys_of, section_below, sections_in
from pipeline.recipe.settings import MAX_COUNT, one_of
from pipeline.recipe.yaml_document import KeyPath, dotted

MAX_SHOWN_CHARACTERS = 80
"""Maximum length of a value in a message."""

_RESEMBLING, _CLOSE = 0.6, 0.8
"""Least similarity of a suggested key, see `difflib.get_close_matches`; for a key of another section too."""

WhatAndFix = tuple[str, str]


@dataclass(frozen=True)
class FileKind:
    """A kind of YAML file.

    Attributes:
        name: Name in messages, such as `recipe`.
        first_key: Key that most files start with.
        example: Files to start from, for the message about an empty file.
        schema: Path of the JSON schema in the project, which has the descriptions of all keys.
        unknown_key_fix: Function that returns a special fix for an unknown key, or None.
    """

    name: str
    model: type[BaseModel]
    first_key: str
    example: str
    schema: str
    unknown_key_fix: Callable[[KeyPath], str | None]


@dataclass(frozen=True)
class InvalidValue:
    """A value that pydantic refuses, with the names and details of `pydantic_core.ErrorDetails`.

    Attributes:
        data: Content of the file, which decides the types of its sections.
        path: The key at fault.
    """

    kind: FileKind
    data: Any
    path: KeyPath
    type: str
    value: Any
    context: dict[str, Any]

    @property
    def field(self) -> FieldInfo | None:
        """Field of the key; None for an unknown key."""
        return field_below(self.kind.model, self.path, self.data)

    @property
    def name(self) -> str:
        """Full name of the key in messages."""
        return dotted(self.path) or f"the {self.kind.name}"

    def section(self, path: KeyPath) -> type[BaseModel] | None:
        """Return the model of the section at `path`."""
        return section_below(self.kind.model, path, self.data)


def describe(error: InvalidValue) -> WhatAndFix:
    """Return what is wrong, and the fix."""
    return _DESCRIPTIONS.get(error.type, _other)(error)


def _unknown_key(error: InvalidValue) -> WhatAndFix:
    path, key = error.path, str(error.path[-1])
    what = f"unknown key {key}"
    if (fix := error.kind.unknown_key_fix(path)) is not None:
        return what, fix

    section = error.section(path[:-1])
    section_keys = list(keys_of(section)) if section is not None else []
    every_key = dict.fromkeys(all_keys_of(error.kind.model))
    others = (full for full in every_key if full != dotted(path))
    same_name = [full for full in others if full.rpartition(".")[2] == key]

    # A key of another section is more likely than a misspelling that is not close.
    cutoff = _CLOSE if same_name else _RESEMBLING
    if close := difflib.get_close_matches(key, section_keys, n=1, cutoff=cutoff):
        return what, f"did you mean {close[0]}?"
    if same_name:
        # Keys of few sections come first, because they are used more often, and then those for all datasets.
        same_name.sort(key=lambda full: (full.count("."), full.startswith("datasets.")))
        return what, f"write it as {one_of(same_name)}, or remove it"
    name = dotted(path[:-1]) or f"a {error.kind.name}"
    return what, f"remove it; the keys of {name} are {', '.join(section_keys)}"


def _missing(error: InvalidValue) -> WhatAndFix:
    info, key = error.field, error.path[-1]
    # The first sentence says what to write; docs/recipes.md has the rest.
    description = (info.description or "" if info is not None else "").partition(". ")[0].removesuffix(".")
    meaning = f": {description}" if description else ""
    return f"required key {key} is missing", f"add {key}{meaning}"


def _wrong_type(expected: str) -> Callable[[InvalidValue], WhatAndFix]:
    def describe(error: InvalidValue) -> WhatAndFix:
        what = f"{error.name} must be {expected}, got {_shown(error.value)}"
        return what, _type_fix(error, expected)

    return describe


_BOOLEAN_WORDS = {
    **dict.fromkeys(("true", "yes", "on"), "true"),
    **dict.fromkeys(("false", "no", "off"), "false"),
}


def _type_fix(error: InvalidValue, expected: str) -> str:
    path, value, section = error.path, error.value, error.section(error.path)
    if expected == "true or false" and isinstance(value, str) and value.lower() in _BOOLEAN_WORDS:
        fix = f"write {_BOOLEAN_WORDS[value.lower()]}, without quotes"
    elif expected == "text" and isinstance(value, int | float):
        fix = f"put it in quotes: {json.dumps(json.dumps(value))}"
    elif expected in ("an integer", "a number") and isinstance(value, str) and _is_number(value):
        fix = f"write {value}, without quotes"
    elif isinstance(value, list) and (several := _key_for_several(error)):
        fix = f"write {several}: {_plain(value)}"
    elif expected == "a list" and isinstance(value, dict) and value:
        first = next(iter(cast("dict[str, Any]", value)))
        fix = f"make it a list item: put a dash before its first key, - {first}: ..., and indent the rest"
    elif expected == "a list":
        # A scalar is most likely the only item of the intended list.
        item = json.dumps(value, ensure_ascii=False) if isinstance(value, str | int | float) else "..."
        key = next(part for part in reversed(path) if isinstance(part, str))
        fix = f"write a list: {key}: [{item}]"
    elif expected == "a mapping of keys" and (kinds := _kinds(error)):
        fix = f"write {path[-1]}: {{kind: {value if value in kinds else kinds[0]}}}"
    elif expected == "a section of keys" and section is not None:
        fix = f"indent keys below it; its keys are {', '.join(keys_of(section))}"
    else:
        example = _example(error.field)
        fix = f"write {expected}" + (f", such as {_plain(example)}" if example is not None else "")
    return fix


def _key_for_several(error: InvalidValue) -> str | None:
    """Return the key of the same section that takes a list of such values, such as resolutions, or None."""
    section = error.section(error.path[:-1])
    name = f"{error.path[-1]}s"
    return name if section is not None and name in keys_of(section) else None


def _example(info: FieldInfo | None) -> bool | int | float | str | None:
    if info is None:
        return None

    candidates = [info.default, *(info.examples or [])]
    return next((each for each in candidates if isinstance(each, bool | int | float | str)), None)


def _out_of_range(error: InvalidValue) -> WhatAndFix:
    limits = _declared_limits(error) or error.context
    # A user who wrote 0 steps need not know the limit that catches typing errors.
    if "ge" in error.context and limits.get("le") == MAX_COUNT:
        limits = error.context
    required = _range(limits)
    return f"{error.name} must be {required}, got {_shown(error.value)}", f"use a value {required}"


def _declared_limits(error: InvalidValue) -> dict[str, Any]:
    # Pydantic's error has one of the limits only, and a message should show the range.
    info = error.field
    if info is None or not isinstance(error.path[-1], str):
        return {}
    names = ("gt", "ge", "lt", "le")
    return {name: getattr(each, name) for each in info.metadata for name in names if hasattr(each, name)}


def _range(limits: dict[str, Any]) -> str:
    if "ge" in limits and "le" in limits:
        return f"between {_limit(limits['ge'])} and {_limit(limits['le'])}"
    words = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}
    return " and ".join(f"{words[name]} {_limit(limits[name])}" for name in words if name in limits)


def _limit(limit: float) -> str:
    # 1.0 becomes 1, but an integer of ten digits must not become 1e+09.
    return f"{limit:g}" if isinstance(limit, float) else str(limit)


def _not_a_choice(error: InvalidValue) -> WhatAndFix:
    info = error.field
    choices = [] if info is None else list(_choices(info.annotation))
    return _choice(error, choices)


def _unknown_kind(error: InvalidValue) -> WhatAndFix:
    return _choice(error, _kinds(error))


def _missing_kind(error: InvalidValue) -> WhatAndFix:
    return f"required key {error.path[-1]} is missing", f"add {error.path[-1]}: {one_of(_kinds(error))}"


def _kinds(error: InvalidValue) -> list[str]:
    # The key is either the section or the key `kind` in it.
    path = error.path[:-1] if error.path[-1] == KIND else error.path
    field = field_below(error.kind.model, path, error.data)
    sections = [] if field is None else list(sections_in(field.annotation))
    if len(sections) < 2:
        return []
    return [kind for each in sections for kind in _choices(keys_of(each)[KIND].annotation)]


def _choice(error: InvalidValue, choices: list[str]) -> WhatAndFix:
    value = str(error.value)
    close = difflib.get_close_matches(value, choices, n=1)
    # Longer names of other trainers, such as cosine_annealing.
    close = close or [choice for choice in choices if value.startswith(f"{choice}_")]
    what = f"{error.name} must be {one_of(choices)}, got {_shown(error.value)}"
    return what, f"did you mean {close[0]}?" if close else f"use {one_of(choices)}"


def _choices(annotation: Any) -> Iterator[str]:
    # The annotation may be a list of literals, or an optional one.
    for argument in get_args(annotation):
        if get_origin(annotation) is Literal:
            yield str(argument)
        else:
            yield from _choices(argument)


def _bad_name(error: InvalidValue) -> WhatAndFix:
    what = f"{error.name} must contain only letters, digits, _ and -, got {_shown(error.value)}"
    return what, "use only A-Z, a-z, 0-9, _ and -"


def _not_finite(error: InvalidValue) -> WhatAndFix:
    return f"{error.name} must be a finite number, got {_shown(error.value)}", "write a number"


def _too_short(error: InvalidValue) -> WhatAndFix:
    least = counted(error.context.get("min_length", 1), "item or character", "items or characters")
    return f"{error.name} must not be empty", f"write at least {least}, or remove the key if it is optional"


def _too_long(error: InvalidValue) -> WhatAndFix:
    most = error.context.get("max_length", "fewer")
    return f"{error.name} must have at most {most} values, got {_shown(error.value)}", f"write {most} values"


def _other(error: InvalidValue) -> WhatAndFix:
    reason = error.context.get("error", "invalid value")
    return (
        f"{error.name} is not valid ({reason}), got {_shown(error.value)}",
        f"see the key's description in {error.kind.schema}",
    )


_DESCRIPTIONS: dict[str, Callable[[InvalidValue], WhatAndFix]] = {
    "extra_forbidden": _unknown_key,
    "missing": _missing,
    "literal_error": _not_a_choice,
    "union_tag_invalid": _unknown_kind,
    "union_tag_not_found": _missing_kind,
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
    "dict_type": _wrong_type("a mapping of keys"),
    "model_type": _wrong_type("a section of keys"),
    "model_attributes_type": _wrong_type("a section of keys"),
    **dict.fromkeys(("greater_than", "greater_than_equal", "less_than", "less_than_equal"), _out_of_range),
}
"""Descriptions by pydantic's error type."""


def _shown(value: Any) -> str:
    # A key without a value is null in YAML.
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
