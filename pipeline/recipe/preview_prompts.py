"""The section `training.sample_prompts`: the prompts of the previews, each with its own settings."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, Field

from pipeline.recipe.settings import Settings, Violation, reject
from pipeline.recipe.validators import check_path

DEFAULT_PREVIEW_STEPS = 20
"""Number of denoising steps of a preview."""

MAX_PREVIEW_STEPS = 1000
"""Maximum number of denoising steps of a preview."""

MAX_PREVIEW_EDGE_PX = 8192
"""Maximum height and width of a preview."""


# Not strict, because a section has passed a validator and is no longer read as JSON.
LocalFile = Annotated[Path, Field(strict=False), BeforeValidator(check_path)]
"""Path of a file."""


class DrawnPrompt(Settings):
    """A prompt, and how its pictures are drawn."""

    prompt: str = Field(min_length=1, description="Text that the picture shows.")
    negative_prompt: str | None = Field(
        default=None,
        min_length=1,
        description="Text that the guidance leads away from; null uses the empty caption, see "
        "docs/recipe_guide.md. Not available "
        "for FLUX.1, FLUX.2 dev, distilled FLUX.2 klein, Ideogram 4, Lumina Image 2 and Sana.",
    )
    height: int | None = Field(
        default=None,
        ge=1,
        le=MAX_PREVIEW_EDGE_PX,
        description="Height in pixels, a multiple of the base model's size multiple. null draws the squarest "
        "bucket of the largest resolution.",
    )
    width: int | None = Field(
        default=None,
        ge=1,
        le=MAX_PREVIEW_EDGE_PX,
        description="Width in pixels; set it together with `height`.",
    )
    steps: int = Field(
        default=DEFAULT_PREVIEW_STEPS,
        ge=1,
        le=MAX_PREVIEW_STEPS,
        description="Number of denoising steps.",
    )
    guidance_scale: float | None = Field(
        default=None,
        ge=0.0,
        description="Guidance scale; null uses the one listed for the base model's family. Most pipelines "
        "turn guidance off at 1 and below, and then ignore the negative prompt.",
    )

    def violations(self) -> Iterator[Violation]:
        """See `Settings.violations`."""
        if (self.height is None) != (self.width is None):
            given, missing = ("height", "width") if self.width is None else ("width", "height")
            what = f"{given} requires {missing}, got {given}: {getattr(self, given)}"
            fix = f"set {missing}, or remove {given}"
            yield Violation(given, what, fix, involves=("height", "width"))


class PreviewPrompt(DrawnPrompt):
    """A prompt of the previews. A plain text is the same as a section with only `prompt`."""

    seed: int | None = Field(
        default=None, ge=0, lt=2**63, description="Seed of the first noise; null uses `training.seed`."
    )
    lora_scale: float | None = Field(
        default=None,
        description="Factor of the LoRA's effect in this preview; 0 draws the base model, and a negative "
        "number the opposite of what was learned. Training does not change. null means 1, and in a recipe "
        "with `datasets[].slider` three pictures: at -1, 0 and 1.",
    )

    references: tuple[LocalFile, ...] = Field(
        default=(),
        strict=False,
        description="Reference images of this preview, in order, for base models that edit images. The base "
        "model's pipeline in diffusers scales them. Relative to the project root.",
    )


def _text_as_section(value: object) -> Any:
    if isinstance(value, str):
        return {"prompt": value}
    if not isinstance(value, dict | PreviewPrompt):
        reject(
            f"a prompt must be text or a section of keys, got {value}", "write text, or a section with prompt"
        )
    if isinstance(value, dict) and len(value) == 1:
        ((key, text),) = cast("dict[str, object]", value).items()
        is_key = difflib.get_close_matches(key, PreviewPrompt.model_fields, n=1)
        if not is_key and isinstance(text, str):
            # YAML reads a text with a colon and a blank as a key and its value.
            quoted = json.dumps(f"{key}: {text}", ensure_ascii=False)
            reject(f"a prompt with a colon must be in quotes, got {key}: {text}", f"write {quoted}")
    return value


PreviewPrompts = tuple[
    Annotated[PreviewPrompt, BeforeValidator(_text_as_section, json_schema_input_type=str | PreviewPrompt)],
    ...,
]
