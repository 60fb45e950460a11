"""Base class of every recipe section, and how sections report violations of their rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NoReturn, Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

# Anything above is a typing error.
MAX_COUNT = 1_000_000_000
"""Upper bound of steps, samples and processes."""

VIOLATION = "latentline"
"""Pydantic error type of every violation."""


@dataclass(frozen=True)
class Violation:
    """A value that breaks a rule.

    Attributes:
        key: Key relative to the section that the rule belongs to (`resolution`, `[1].name`); empty for the
            value being validated.
        what: The rule and the value, "X must be Y, got Z".
        fix: What to write instead.
        involves: Keys of the section that the rule compares. If one of them is invalid by itself, the
            violation is not reported.
    """

    key: str
    what: str
    fix: str
    involves: tuple[str, ...] = ()


class Settings(BaseModel):
    """Base of every section: strict types, no unknown keys, immutable after loading."""

    # Strict: `"False"` is not a boolean, and `1.0` is not an integer.
    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        serialize_by_alias=True,
        protected_namespaces=(),
    )

    requirements: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Fields that have an effect only with some values of another one: (field, other field, *values)."""

    def violations(self) -> Iterator[Violation]:
        """Yield the violations of the section's rules, except `requirements`."""
        yield from ()

    def _unmet_requirements(self) -> Iterator[Violation]:
        fields = type(self).model_fields
        for key, field, *values in self.requirements:
            actual, other = getattr(self, field), fields[field].alias or field
            if actual not in values and getattr(self, key) != fields[key].default:
                name = fields[key].alias or key
                what = f"{name} requires {other}: {one_of(values)}, got {other}: {actual}"
                fix = f"set {other}: {one_of(values)}, or remove {name}"
                yield Violation(name, what, fix, involves=(name, other))

    @model_validator(mode="after")
    def _keeps_its_rules(self) -> Self:
        # A validator can raise one error only, so this error carries all violations.
        if violations := [*self._unmet_requirements(), *self.violations()]:
            raise _error(violations)
        return self


def reject(what: str, fix: str) -> NoReturn:
    """Report a violation of the value being validated; for validators."""
    raise _error([Violation("", what, fix)])


def _error(violations: list[Violation]) -> PydanticCustomError:
    return PydanticCustomError(VIOLATION, "{violations}", {"violations": violations})


def one_of(choices: Iterable[object]) -> str:
    """Return `a`, `a or b`, or `a, b or c`."""
    *head, last = [str(choice) for choice in choices]
    return f"{', '.join(head)} or {last}" if head else last
