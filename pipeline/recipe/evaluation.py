"""The section `evaluation`: which pictures are drawn with each step of a run, and how they are scored."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, WrapSerializer

from pipeline.recipe.preview_prompts import DrawnPrompt, LocalFile, PreviewPrompt
from pipeline.recipe.settings import Settings, Violation, one_of, reject

Role = Literal["concept", "trained", "other", "base"]
"""What a prompt tests: the learned concept, whether trained images are repeated, other subjects in the
concept's style, or what must not change."""

SCORERS: dict[str, str] = {
    "dino": "facebook/dinov2-base",
    "clip": "openai/clip-vit-large-patch14",
    "siglip": "google/siglip2-base-patch16-224",
}
"""Scorers by their names in a recipe, with the repository of their weights on the Hub."""

AUTO = "auto"

MAX_PICTURES = 64
"""Maximum number of pictures per prompt."""

MAX_STRENGTH = 10.0

_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class EvaluationPrompt(DrawnPrompt):
    """A prompt of the evaluation, with its role. `pictures` and `strengths` replace seed and scale."""

    references: tuple[LocalFile, ...] = Field(
        default=(),
        strict=False,
        description="Reference images, in order, for base models that edit images. Relative to the project "
        "root.",
    )
    role: Role = Field(
        description="concept: shows what was learned, and is compared with held-out images. trained: the "
        "caption of a trained image, which must not be repeated. other: another subject, which must still "
        "follow its prompt. base: has nothing to do with the LoRA, and must not change."
    )

    def as_preview(self) -> PreviewPrompt:
        """Return a preview prompt that is drawn in the same way, at the full strength of the LoRA."""
        # Without a scale, it would stand for three pictures in a recipe with sliders.
        values = {name: value for name, value in self if name != "role"}
        return PreviewPrompt(**values, lora_scale=1.0)


def _check_prompt(value: object) -> Any:
    if isinstance(value, str):
        reject(
            f"a prompt of the evaluation must have a role, got {value!r}",
            f"write {{prompt: {value!r}, role: concept}}, or the role trained, other or base",
        )
    return value


def _check_prompts(value: object) -> Any:
    # A union of text and list would report a mistake once per member.
    if value == AUTO:
        return ()
    if not isinstance(value, list | tuple) or not value:
        shown = "an empty list" if value in ([], ()) else value
        reject(
            f"evaluation.prompts must be auto or a list of prompts, got {shown}",
            "use auto, or a list such as [{prompt: a red rose, role: concept}]",
        )
    return cast("Any", value)


def _prompts_or_auto(value: object, as_list: SerializerFunctionWrapHandler) -> Any:
    return as_list(value) or AUTO


def _check_steps(value: object) -> Any:
    if value in ("all", "last"):
        return value
    steps = cast("list[Any]", value) if isinstance(value, list | tuple) else []
    if not steps or not all(
        isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in steps
    ):
        reject(
            f"evaluation.steps must be all, last or a list of steps above 0, got {value}",
            "use all, last, or a list such as [500, 1000]",
        )
    return tuple(steps)


class ScorerSettings(Settings):
    """A scorer. A plain text is the same as a section with only `name`."""

    name: str = Field(
        min_length=1,
        description="dino, clip or siglip, or the import path of a scorer's class such as "
        "demo.score:WorldScorer, see docs/evaluation.md.",
    )
    weights: str | None = Field(
        default=None,
        min_length=1,
        description="Hub id (owner/name), or a local folder relative to the project root. null uses "
        "the repository that docs/evaluation.md lists. The class of an import path gets it as the argument "
        "`weights`.",
    )
    revision: str | None = Field(
        default=None,
        min_length=1,
        description="Branch, tag or commit of the Hub id; null means the main branch.",
    )

    @property
    def is_import_path(self) -> bool:
        """Whether the scorer is a class outside of Latentline."""
        return self.name not in SCORERS

    def violations(self) -> Iterator[Violation]:
        """See `Settings.violations`."""
        if self.is_import_path and not _IMPORT_PATH.fullmatch(self.name):
            close = difflib.get_close_matches(self.name, SCORERS, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            what = f'a scorer must be {one_of([*SCORERS, "an import path"])}, got "{self.name}"'
            yield Violation("name", what, f"{hint}use {one_of(SCORERS)}, or module:Class")
        if self.is_import_path and self.revision is not None:
            what = f"revision requires {one_of(SCORERS)}, got the import path {self.name}"
            yield Violation("revision", what, "remove revision", involves=("name",))


def _scorer_as_section(value: object) -> Any:
    return {"name": value} if isinstance(value, str) else value


Scorers = tuple[
    Annotated[
        ScorerSettings, BeforeValidator(_scorer_as_section, json_schema_input_type=str | ScorerSettings)
    ],
    ...,
]

# Not strict, because the value has passed a validator and is no longer read as JSON.
Prompts = Annotated[
    tuple[Annotated[EvaluationPrompt, BeforeValidator(_check_prompt)], ...],
    Field(strict=False),
    BeforeValidator(_check_prompts, json_schema_input_type=Literal["auto"] | list[EvaluationPrompt]),
    WrapSerializer(_prompts_or_auto),
]
Steps = Annotated[
    Literal["all", "last"] | Annotated[tuple[int, ...], Field(strict=False)],
    BeforeValidator(_check_steps, json_schema_input_type=Literal["all", "last"] | list[int]),
]


def repeated_prompts(prompts: Sequence[EvaluationPrompt]) -> Iterator[Violation]:
    """Yield a violation for each prompt that is in the list before with the same role."""
    texts = [(each.prompt, each.role) for each in prompts]
    for index, (text, role) in enumerate(texts):
        if (text, role) in texts[:index]:
            what = f"prompts of one role must differ, got {text!r} twice with role: {role}"
            yield Violation(f"prompts[{index}]", what, "remove one of them, or change its text")


class LimitSettings(Settings):
    """Values that a chosen step must not exceed."""

    drift: float = Field(
        default=0.15,
        ge=0.0,
        le=2.0,
        description="Largest drift: mean distance of pictures with base prompts from the base model's.",
    )
    copies: float = Field(
        default=0.1,
        ge=0.0,
        le=2.0,
        description="Largest excess of the similarity between pictures for captions of trained images and "
        "these images over the same for held-out images; exceeded if the 95% interval is completely above "
        "it.",
    )


class EvaluationSettings(Settings):
    """Pictures that are drawn with each step of a run, and how they are scored."""

    prompts: Prompts = Field(
        default=(),
        json_schema_extra={"default": AUTO},
        description="auto, or a list of prompts with the keys of `training.sample_prompts` and a role. auto "
        "takes prompts from the dataset: captions of the holdout and the trigger word (concept), as "
        "many captions of trained images (trained), other subjects with the trigger word (other), and "
        "prompts without it (base).",
    )
    pictures: int = Field(
        default=4,
        ge=1,
        le=MAX_PICTURES,
        description="Number of pictures per prompt, with the seeds 0, 1, ... for all steps and for the base "
        "model.",
    )
    steps: Steps = Field(
        default="all",
        description="Steps to evaluate: all with a LoRA, last, or a list of steps.",
    )
    strengths: tuple[Annotated[float, Field(gt=0.0, le=MAX_STRENGTH)], ...] = Field(
        default=(1.0,), min_length=1, description="Strengths of the LoRA, above 0."
    )
    scorers: Scorers = Field(
        default=(ScorerSettings(name="dino"), ScorerSettings(name="clip")),
        min_length=1,
        description="Models that compare pictures with images and texts: dino, clip, siglip, or import "
        "paths.",
    )
    publish: Literal["last", "best"] = Field(
        default="last",
        description="Step that a job publishes in lora/. best: the one that the evaluation chooses, or the "
        "last one if it chooses none. A step of `latentline export` stays.",
    )
    limits: LimitSettings = Field(
        default_factory=LimitSettings, description="Values that a chosen step must not exceed."
    )

    def violations(self) -> Iterator[Violation]:
        """See `Settings.violations`."""
        names = [each.name for each in self.scorers]
        for index, name in enumerate(names):
            if name in names[:index]:
                what = f"scorers must be unique, got {name} twice"
                yield Violation(f"scorers[{index}]", what, "remove one of them")
        yield from repeated_prompts(self.prompts)
        if len(set(self.strengths)) < len(self.strengths):
            what = f"strengths must be unique, got {', '.join(map(str, self.strengths))}"
            yield Violation("strengths", what, "remove repeated strengths")
