"""Base class of every recipe section, and how a section's validators report violations.

A validator calls `raise_violations`, or `reject` for the value being validated. `errors.find_mistakes` turns
violations into mistakes with file and line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

MAX_COUNT = 1_000_000_000
"""Upper bound of steps, samples and processes; anything above is a typing error."""

VIOLATION = "latentline"
"""Pydantic error type of every violation."""


class Settings(BaseModel):
    """Base of every section: strict types, no unknown keys, immutable after loading."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        serialize_by_alias=True,
        protected_namespaces=(),
    )


@dataclass(frozen=True)
class Violation:
    """A value that breaks a rule.

    Attributes:
        key: Key relative to the section that the rule belongs to (`resolution`, `[1].name`); empty for the
            value being validated.
        what: The rule and the value, "X must be Y, got Z".
        fix: What to write instead.
    """

    key: str
    what: str
    fix: str


def raise_violations(violations: Sequence[Violation], *, involves: Iterable[str] = ()) -> NoReturn:
    """Report violations to pydantic.

    Args:
        violations: At least one.
        involves: Keys of the section that the rule compares. If one of them is invalid by itself, the
            violations are not reported.

    Raises:
        PydanticCustomError: Always.
    """
    context = {"violations": list(violations), "involves": list(involves)}
    raise PydanticCustomError(VIOLATION, "{violations}", context)


def reject(what: str, fix: str) -> NoReturn:
    """Report a violation of the value being validated.

    Raises:
        PydanticCustomError: Always.
    """
    raise_violations([Violation("", what, fix)])


def one_of(choices: Iterable[object]) -> str:
    """Return `a`, `a or b`, or `a, b or c`."""
    *head, last = [str(choice) for choice in choices]
    return f"{', '.join(head)} or {last}" if head else last
