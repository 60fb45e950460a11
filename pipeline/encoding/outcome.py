"""How the making of one entry ends: with its tensors, or with the reason why there are none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from pipeline.cache.entry_format import Array


@dataclass(frozen=True)
class Encoded:
    """An entry's tensors, as `Store.write` takes them, and the metadata that only the encoder knows."""

    tensors: Mapping[str, Array]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Failure:
    """Why an entry could not be made; the parts of a row of the table `rejected`."""

    reason: str
    detail: str
    fix: str


Outcome: TypeAlias = Encoded | Failure | Literal["present"]
"""`present`: another process put the entry in place since the stage looked."""
