"""What every section of a recipe has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

MAX_COUNT = 1_000_000_000
"""Of steps, samples and processes: anything above is a slip of the hand."""


class Settings(BaseModel):
    """Base of every section: unknown keys are errors, nothing is converted, nothing changes afterwards."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        serialize_by_alias=True,
        protected_namespaces=(),
    )
