"""The adapters of the text encoders, for those who train them too."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.recipe.section import Settings

MAX_RANK = 4096


class TextEncoderSettings(Settings):
    """LoRA on the text encoders, beside the denoiser's."""

    rank: int | None = Field(
        default=None,
        ge=1,
        le=MAX_RANK,
        description="Inner dimension of each adapter matrix; null: `training.lora.rank`.",
    )
    alpha: float | None = Field(
        default=None,
        gt=0.0,
        description="null: in proportion to the rank, so that they are scaled as the denoiser's are.",
    )
    targets: Literal["attention", "blocks"] = Field(
        default="attention",
        description="Which of their layers get an adapter. attention: query, key, value and output of each "
        "attention. blocks: these and the feed-forward ones, as kohya's tools do.",
    )
    learning_rate: float | None = Field(
        default=None,
        gt=0.0,
        description="Of these adapters, with the schedule of the others; null: `training.learning_rate`. "
        "Half of that or less is usual.",
    )
