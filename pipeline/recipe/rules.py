"""The rules of a recipe that a type alone does not say, each with the fix that goes with it.

A rule is broken by raising through `raise_broken` (or `reject` for the value at hand); the loader adds the
file and line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import NoReturn, Protocol, TypeVar

from pydantic_core import PydanticCustomError

from pipeline.errors import verb
from pipeline.recipe.gates import GATES, NEVER_OPEN, PATH_ISOLATION
from pipeline.storage.addresses import Url, is_url

BROKEN = "latentline"
"""The pydantic error type of every rule here."""

LISTING_SUFFIXES = (".parquet", ".jsonl", ".csv")
"""Of files that list images, as a dataset's `path`."""

LATENT_FACTOR = 8
"""Pixels a latent's edge stands for in every supported model; steps that are no multiple of it never work."""


class Named(Protocol):
    """Anything with a name."""

    @property
    def name(self) -> str:
        """The name."""
        ...


NamedT = TypeVar("NamedT", bound=Named)


@dataclass(frozen=True)
class Broken:
    """One broken rule.

    Attributes:
        key: The key meant, below the section that the rule belongs to (`resolution`, `[1].name`); empty
            for the value itself.
        what: What is wrong, with the value met.
        fix: What to write instead.
    """

    key: str
    what: str
    fix: str


def raise_broken(broken: Sequence[Broken], *, involves: Iterable[str] = ()) -> NoReturn:
    """Tell pydantic that rules are broken.

    Args:
        broken: At least one.
        involves: Keys of the section that the rule compares: where one of them is wrong by itself, this
            rule is not reported.

    Raises:
        PydanticCustomError: Always.
    """
    context = {"broken": list(broken), "involves": list(involves)}
    raise PydanticCustomError(BROKEN, "{broken}", context)


def reject(what: str, fix: str) -> NoReturn:
    """Tell pydantic that the value at hand breaks a rule.

    Raises:
        PydanticCustomError: Always.
    """
    raise_broken([Broken("", what, fix)])


def check_path(value: object) -> object:
    """`value` unless it is text that names no local path."""
    if isinstance(value, str) and is_url(value):
        reject(f"{value} is an address, and this must be a local folder", "name a folder of this machine")
    return check_address(value)


_COPIES_OF_UNKNOWN_AGE = frozenset(["filecache", "blockcache", "cached"])
"""Of fsspec's local copies, those that hide what the service says of a file's size and version."""


def check_address(value: object) -> object:
    """`value` unless it is text that names neither a local path nor an address with a known protocol."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        reject("the path is empty", "name a folder; relative paths start at the project root")
    if "\0" in value:
        reject("the path holds a NUL character, which no file system takes", "remove it")
    if is_url(value):
        _check_protocols(Url(value))
    return value


def _check_protocols(url: Url) -> None:
    from fsspec.registry import available_protocols  # only for recipes with an address

    *inner, last = url.links
    known = available_protocols()
    for protocol in [link.partition("://")[0] for link in (*inner, *([last] if "://" in last else []))]:
        if protocol not in known:
            close = difflib.get_close_matches(protocol, known, n=1, cutoff=0.5)
            fix = (
                f"did you mean {close[0]}?" if close else "use s3, gs, abfs, https, sftp or zip, or a folder"
            )
            reject(f"{url} begins with {protocol}, a protocol that fsspec does not know", fix)
        if protocol in _COPIES_OF_UNKNOWN_AGE:
            fix = f"leave {protocol}:: out, or write simplecache::, which keeps them for one process"
            reject(f"{url} reads through {protocol}, whose copies of files say nothing of their version", fix)


def check_folder(value: object) -> object:
    """`value` unless it is text that names no local folder."""
    return check_path(check_no_listing(value))


def check_no_listing(value: object) -> object:
    """`value` unless it is text that names a listing."""
    if isinstance(value, str) and PurePath(value).suffix.lower() in LISTING_SUFFIXES:
        reject(f"{value} is a listing, and this must be a folder", "name a folder")
    return value


def check_suffix(value: str) -> str:
    """`value` if it is a dot and something after it, without a path separator."""
    if "/" in value or "\\" in value or value.strip(". \t\n") == "":
        reject(f"{value!r} is no file suffix", "use a dot and letters, such as .txt")
    if not value.startswith("."):
        reject(f"suffix {value} has no leading dot", f"use .{value}")
    return value


def check_encoding(value: str) -> str:
    """`value` if Python decodes text by that name."""
    try:
        "a".encode(value)
    except (LookupError, ValueError):
        reject(f"{value!r} is no text encoding that Python knows", "use utf-8, utf-16, cp1252 or latin-1")
    return value


def check_gate(value: str) -> str:
    """`value` if it is the name of a gate that may be opened."""
    if value == PATH_ISOLATION.name:
        reject(
            f"{value} cannot be allowed: it protects the dataset from being written into",
            "remove it, and put dataset, cache_dir and output_dir side by side",
        )
    if value in NEVER_OPEN:
        what = f"{value} cannot be allowed: training reads every entry, and an entry is right or wrong"
        reject(what, "remove it, and run the cache job: it makes what is missing or damaged")
    if value not in GATES:
        close = difflib.get_close_matches(value, GATES, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        reject(f"no gate is called {value!r}", f"{hint}the gates are {', '.join(GATES)}")
    return value


def repeated_names(items: tuple[NamedT, ...]) -> tuple[NamedT, ...]:
    """`items` unless two have one name, also when only case tells them apart."""
    first: dict[str, str] = {}
    broken: list[Broken] = []
    for index, item in enumerate(items):
        folded = item.name.casefold()
        if folded not in first:
            first[folded] = item.name
            continue
        what = f"dataset names {first[folded]} and {item.name} differ only in case"
        if first[folded] == item.name:
            what = f"two datasets are named {item.name}"
        broken.append(Broken(f"[{index}].name", what, "give each dataset a name of its own"))
    if broken:
        raise_broken(broken)
    return items


def broken_weights(weights: Sequence[float | None], exhausted: str) -> list[Broken]:
    """What contradicts itself in the weights of the datasets, in their order, and `training.exhausted`."""
    given = [index for index, weight in enumerate(weights) if weight is not None]
    if not given and exhausted != "leave":
        what = f"exhausted {exhausted} has no effect: no dataset has a weight, so all end together"
        return [Broken("training.exhausted", what, "give each dataset a weight, or remove exhausted")]
    if given and len(given) < len(weights):
        missing = next(index for index, weight in enumerate(weights) if weight is None)
        what = f"{len(given)} of {len(weights)} datasets {verb(len(given), 'has', 'have')} a weight"
        what += ", this one has none"
        return [Broken(f"datasets[{missing}]", what, "give each dataset a weight, or none")]
    return []


def broken_focus(has_focus: Sequence[bool], crop: str) -> list[Broken]:
    """What contradicts itself in the datasets' `focus_columns`, in their order, and `buckets.crop`."""
    if crop == "focus" and not any(has_focus):
        what = "crop: focus has no effect: no dataset has focus_columns"
        fix = "name them in datasets[].focus_columns, or set crop: centre"
        return [Broken("buckets.crop", what, fix)]
    if crop != "focus" and any(has_focus):
        what = f"focus_columns have no effect with buckets.crop: {crop}"
        return [Broken(f"datasets[{has_focus.index(True)}].focus_columns", what, "set buckets.crop: focus")]
    return []


def divisible(resolution: int, step: int) -> Broken | None:
    """The broken rule when `resolution` is no multiple of `step`, with values that would work."""
    if resolution % step == 0:
        return None
    below, above = resolution // step * step, (resolution // step + 1) * step
    fix = f"use {above}" if below == 0 else f"use {below} or {above}"
    steps = [n for n in range(LATENT_FACTOR, step, LATENT_FACTOR) if resolution % n == 0]
    if steps:
        fix += f", or set buckets.step to {one_of(steps[-4:])}"
    return Broken("resolution", f"resolution {resolution} is not a multiple of step {step}", fix)


def one_of(choices: Iterable[object]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    *head, last = [str(choice) for choice in choices]
    return f"{', '.join(head)} or {last}" if head else last
