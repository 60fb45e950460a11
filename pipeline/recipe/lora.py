"""The section `training.lora`: the adapter."""

from __future__ import annotations

from pydantic import Field

from pipeline.recipe.section import Settings


class LoraSettings(Settings):
    """The size of the adapter."""

    rank: int = Field(default=16, ge=1, le=4096, description="Inner dimension of each adapter matrix.")
    alpha: float = Field(
        default=16.0, gt=0.0, description="The adapter is scaled by alpha / rank; usually equal to rank."
    )
