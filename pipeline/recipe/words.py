"""Pydantic's complaints in the words of YAML: what is wrong, and the fix."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from typing import Any, cast, get_args

from pydantic_core import ErrorDetails

from pipeline.recipe.keys import all_keys, field_at, keys_of, section_at
from pipeline.recipe.locate import KeyPath, dotted
from pipeline.recipe.other_trainers import term_of
from pipeline.recipe.rules import one_of

Described = tuple[str, str]
"""What is wrong, and the fix."""


def _unknown_key(path: KeyPath, _value: Any, _context: dict[str, Any]) -> Described:
    key = str(path[-1])
    section = section_at(path[:-1])
    known = list(keys_of(section)) if section is not None else []
    close = difflib.get_close_matches(key, known, n=1)
    elsewhere = [full for full in all_keys() if full.rpartition(".")[2] == key]
    what = f"unknown key {key}"
    term = term_of(key)
    if term is not None:
        return what, term.fix
    if close:
        return what, f"did you mean {close[0]}?"
    if elsewhere:
        return what, f"write it as {one_of(elsewhere)}, or remove it"
    place = dotted(path[:-1]) or "a recipe"
    return what, f"remove it; {place} takes {', '.join(known)}"


def _missing(path: KeyPath, _value: Any, _context: dict[str, Any]) -> Described:
    info = field_at(path)
    meaning = f": {info.description}" if info is not None and info.description else ""
    return f"required key {path[-1]} is missing", f"add {path[-1]}{meaning}"


def _wrong_type(expected: str) -> Callable[[KeyPath, Any, dict[str, Any]], Described]:
    def of_type(path: KeyPath, value: Any, _context: dict[str, Any]) -> Described:
        what = f"{_last_key(path)} is {_shown(value)}, and must be {expected}"
        return what, _type_fix(path, value, expected)

    return of_type


def _item(value: Any) -> str:
    """A value as the one item of a list; dots where it is no plain one."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | int | float) else "..."


def _type_fix(path: KeyPath, value: Any, expected: str) -> str:
    section = section_at(path)
    info = field_at(path)
    default = getattr(info, "default", None)
    if default is None and info is not None and info.examples:
        default = info.examples[0]
    fix = f"write {expected}"
    if expected == "true or false" and isinstance(value, str) and value.lower() in _SPOKEN:
        fix = f"write {_SPOKEN[value.lower()]}, without quotes"
    elif expected == "text" and isinstance(value, int | float):
        fix = f"put it in quotes: {json.dumps(json.dumps(value))}"
    elif "number" in expected and isinstance(value, str) and _is_number(value):
        fix = f"write {value}, without quotes"
    elif expected == "a list":
        fix = f"write it as a list: {_last_key(path)}: [{_item(value)}]"
        if isinstance(value, dict) and value:
            first = next(iter(cast("dict[str, Any]", value)))
            fix = (
                f"make it a list's item: put a dash before its first key, - {first}: ..., and indent the rest"
            )
    elif expected == "a section of keys" and section is not None:
        fix = f"write keys below it; it takes {', '.join(keys_of(section))}"
    elif isinstance(default, bool | int | float | str):
        fix = f"write {expected}, such as {_plain(default)}"
    return fix


_SPOKEN = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}


def _out_of_range(relation: str) -> Callable[[KeyPath, Any, dict[str, Any]], Described]:
    def of_type(path: KeyPath, value: Any, context: dict[str, Any]) -> Described:
        (limit,) = context.values()
        required = f"{relation} {_plain(limit)}"
        return f"{_last_key(path)} is {_shown(value)}, and must be {required}", f"use a value {required}"

    return of_type


def _not_a_choice(path: KeyPath, value: Any, _context: dict[str, Any]) -> Described:
    info = field_at(path)
    choices = [] if info is None else [str(choice) for choice in get_args(info.annotation)]
    close = difflib.get_close_matches(str(value), choices, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{_last_key(path)} is {_shown(value)}", f"{hint}the choices are {', '.join(choices)}"


def _bad_name(path: KeyPath, value: Any, _context: dict[str, Any]) -> Described:
    what = f"{_last_key(path)} {_shown(value)} holds other characters than letters, digits, _ and -"
    return what, "use only A-Z, a-z, 0-9, _ and -"


def _not_finite(path: KeyPath, value: Any, _context: dict[str, Any]) -> Described:
    return f"{_last_key(path)} is {_shown(value)}, and must be a finite number", "write a number"


def _too_short(path: KeyPath, _value: Any, context: dict[str, Any]) -> Described:
    least = context.get("min_length", 1)
    return f"{_last_key(path)} is empty", f"give at least {least}, or remove the key if it is optional"


def _wrong_length(path: KeyPath, value: Any, context: dict[str, Any]) -> Described:
    most = context.get("max_length", "fewer")
    return f"{_last_key(path)} is {_shown(value)}, which is too long", f"give {most} values"


def _unforeseen(path: KeyPath, value: Any, context: dict[str, Any]) -> Described:
    reason = context.get("error", "it is not what this key takes")
    return (
        f"{_last_key(path)} is {_shown(value)}: {reason}",
        "see the key's description in configs/recipe.schema.json",
    )


_DESCRIBED: dict[str, Callable[[KeyPath, Any, dict[str, Any]], Described]] = {
    "extra_forbidden": _unknown_key,
    "missing": _missing,
    "literal_error": _not_a_choice,
    "string_pattern_mismatch": _bad_name,
    "finite_number": _not_finite,
    "too_short": _too_short,
    "string_too_short": _too_short,
    "too_long": _wrong_length,
    "bool_type": _wrong_type("true or false"),
    "int_type": _wrong_type("a whole number"),
    "int_from_float": _wrong_type("a whole number"),
    "int_parsing_size": _wrong_type("a whole number of usual size"),
    "float_type": _wrong_type("a number"),
    "string_type": _wrong_type("text"),
    "path_type": _wrong_type("text"),
    "tuple_type": _wrong_type("a list"),
    "model_type": _wrong_type("a section of keys"),
    "model_attributes_type": _wrong_type("a section of keys"),
    "greater_than": _out_of_range("more than"),
    "greater_than_equal": _out_of_range("at least"),
    "less_than": _out_of_range("less than"),
    "less_than_equal": _out_of_range("at most"),
}


def describe(error: ErrorDetails) -> Described:
    """What is wrong and the fix, for one of pydantic's own errors."""
    of_type = _DESCRIBED.get(error["type"], _unforeseen)
    return of_type(tuple(error["loc"]), error["input"], error.get("ctx", {}))


def _last_key(path: KeyPath) -> str:
    """The last key of `path` with the indices after it: background[2]."""
    names = [index for index, part in enumerate(path) if isinstance(part, str)]
    return dotted(path[names[-1] :]) if names else "the recipe"


def _shown(value: Any) -> str:
    """`value` as YAML has it, so that text is told from a number; cut when long."""
    if value is None:
        return "empty"
    text = f"the text {json.dumps(value, ensure_ascii=False)}" if isinstance(value, str) else _plain(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


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
