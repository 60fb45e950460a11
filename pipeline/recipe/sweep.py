"""The section `sweep`: which settings vary, how the variants are judged, and when they stop."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from pipeline.recipe.keys import all_keys_of, keys_of, sections_in
from pipeline.recipe.settings import MAX_COUNT, Settings, Violation, one_of
from pipeline.recipe.yaml_document import KeyPath

SWEPT_SECTIONS = ("datasets", "model", "buckets", "latents", "text", "training")
"""Sections with keys that may vary. The others do not decide the weights, except `accelerate`, which all
variants share because it decides how their processes are launched."""

PATHS = ("datasets.name", "datasets.path", "datasets.images", "datasets.mask.path", "datasets.references")
"""Names and paths of datasets, and with `_NOT_SWEPT` all paths in these sections."""

_NOT_SWEPT = (*PATHS, "training.lora.start_from", "model.context_lora.path")

DATASETS = "datasets"

_RATE = "rate"


_Values = Annotated[Any, WithJsonSchema({"type": "array", "items": {}, "minItems": 1})]
_Ends = Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "number"}, "minItems": 2})]


class SweptValues(Settings):
    """Lists of values by the dotted name of a recipe key; an item of `datasets` is named by its `name`."""

    model_config = ConfigDict(extra="allow")

    # Pydantic reads the type of extra keys from this annotation.
    __pydantic_extra__: dict[str, _Values] = Field(  # pyright: ignore[reportIncompatibleVariableOverride] - documented by pydantic
        init=False
    )

    def given(self) -> dict[str, tuple[Any, ...]]:
        """Return the values of each key."""
        return {key: tuple(values) for key, values in self.__pydantic_extra__.items()}

    def violations(self) -> Iterator[Violation]:
        """See `Settings.violations`."""
        for key, value in self.__pydantic_extra__.items():
            values = cast("list[Any]", value) if isinstance(value, list | tuple) else []
            texts = {json.dumps(each, sort_keys=True, default=str) for each in values}
            if not values or len(texts) < len(values):
                what = f"the values of {key} must be a list without repetitions, got {_shown(value)}"
                yield Violation(key, what, "write a list such as [1.0e-4, 3.0e-4]")


class SweptRanges(Settings):
    """Lowest and highest value by the dotted name of a recipe key."""

    model_config = ConfigDict(extra="allow")

    # Pydantic reads the type of extra keys from this annotation.
    __pydantic_extra__: dict[str, _Ends] = Field(  # pyright: ignore[reportIncompatibleVariableOverride] - documented by pydantic
        init=False
    )

    def given(self) -> dict[str, tuple[int | float, int | float]]:
        """Return the range of each key."""
        return {key: (ends[0], ends[1]) for key, ends in self.__pydantic_extra__.items()}

    def violations(self) -> Iterator[Violation]:
        """See `Settings.violations`."""
        for key, value in self.__pydantic_extra__.items():
            ends = cast("list[Any]", value) if isinstance(value, list | tuple) else []
            numbers = [each for each in ends if isinstance(each, int | float) and not isinstance(each, bool)]
            if len(ends) != 2 or len(numbers) != 2 or not numbers[0] < numbers[1] < math.inf:
                what = f"the range of {key} must be a list of two ascending numbers, got {_shown(value)}"
                yield Violation(key, what, "write the lowest and the highest value, such as [1.0e-5, 1.0e-3]")
            elif is_logarithmic(key) and numbers[0] <= 0:
                what = f"the range of {key} must be above 0, got {numbers[0]}"
                yield Violation(key, what, "use a lowest value above 0, such as 1.0e-5")


def _shown(value: object) -> str:
    return json.dumps(value, default=str)


class RandomSettings(Settings):
    """Variants with random values. The first ones stay the same if `count` grows."""

    count: int = Field(ge=1, le=MAX_COUNT, description="Number of variants.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of the values.")
    ranges: SweptRanges = Field(
        default_factory=SweptRanges,
        description="Keys with their lowest and highest value. Keys that end in `rate` are drawn "
        "log-uniformly, others uniformly, and integers if both ends are integers.",
        examples=[{"training.learning_rate": [1e-5, 1e-3]}],
    )
    choices: SweptValues = Field(
        default_factory=SweptValues,
        description="Keys with the values to draw from.",
        examples=[{"training.lora.rank": [8, 16, 32]}],
    )

    def violations(self) -> Iterator[Violation]:
        """See `Settings.violations`."""
        ranges, choices, both = self.ranges.given(), self.choices.given(), ("ranges", "choices")
        if not ranges and not choices:
            what = "random must have ranges or choices"
            yield Violation("", what, "add a key that varies to one of them", involves=both)
        for key in sorted(ranges.keys() & choices.keys()):
            what = f"{key} must not be in ranges too"
            yield Violation(f"choices.{key}", what, "remove it from one of them", involves=both)


class HalvingSettings(Settings):
    """Successive halving: variants stop early, and only the best ones go on."""

    first: float = Field(
        default=0.175,
        gt=0.0,
        lt=1.0,
        description="Fraction of its steps after which a variant is judged for the first time.",
    )
    keep: float = Field(
        default=0.5,
        gt=0.0,
        lt=1.0,
        description="Fraction of the variants that go on, rounded up. They are judged again after 1 / keep "
        "times as many steps.",
    )


class BudgetSettings(Settings):
    """Limit of the training of all variants together, without judging them."""

    steps: int | None = Field(default=None, ge=1, le=MAX_COUNT, description="Number of optimizer steps.")
    minutes: float | None = Field(
        default=None, gt=0.0, description="Minutes of optimizer steps, by the time that the first ones took."
    )

    def violations(self) -> Iterator[Violation]:
        """See `Settings.violations`."""
        if (self.steps is None) == (self.minutes is None):
            yield Violation("", "budget must have either steps or minutes", "write budget: {steps: 4000}")


class SweepSettings(Settings):
    """Variants of the recipe, and how the best one is found; see docs/sweeps.md."""

    grid: SweptValues = Field(
        default_factory=SweptValues,
        description="Keys with the values that they take: each combination is a variant.",
        examples=[{"training.learning_rate": [1e-4, 3e-4], "training.lora.rank": [8, 32]}],
    )
    random: RandomSettings | None = Field(default=None, description="Variants with random values.")
    seeds: int = Field(
        default=1,
        ge=1,
        le=100,
        description="Number of runs of each variant, with training.seed, training.seed + 1, ...",
    )
    judge: Literal["evaluation", "validation_loss"] = Field(
        default="evaluation",
        description="evaluation: pictures as in the section `evaluation`, with the same prompts and seeds "
        "for all variants. validation_loss: loss on the same held-out images with the same noise.",
    )
    halving: HalvingSettings | None = Field(
        default_factory=HalvingSettings,
        description="When variants are judged, and how many go on. null trains all of them completely.",
    )
    budget: BudgetSettings | None = Field(
        default=None, description="Limit of all training; fewer variants go on if it would be exceeded."
    )
    max_variants: int = Field(
        default=64, ge=1, le=MAX_COUNT, description="Largest number of variants that is not a mistake."
    )

    @property
    def num_variants(self) -> int:
        """Number of variants."""
        if self.random is not None:
            return self.random.count
        return math.prod(len(values) for values in self.grid.given().values())

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that vary."""
        return tuple(key for _, key in self.placed_keys)

    @property
    def placed_keys(self) -> tuple[tuple[str, str], ...]:
        """Keys that vary, each after the part of the section that names it: `grid`, `random.ranges`, ..."""
        sections: dict[str, Mapping[str, Any]] = {"grid": self.grid.given()}
        if self.random is not None:
            sections |= {"random.ranges": self.random.ranges.given()}
            sections |= {"random.choices": self.random.choices.given()}
        return tuple((section, key) for section, values in sections.items() for key in values)

    def violations(self) -> Iterator[Violation]:
        """See `Settings.violations`."""
        has_grid, both = bool(self.grid.given()), ("grid", "random")
        if has_grid == (self.random is not None):
            what = "sweep must have either grid or random" + (", got both" if has_grid else "")
            fix = "write grid: {training.learning_rate: [1.0e-4, 3.0e-4]}"
            yield Violation("", what, fix, involves=both)
        elif self.num_variants > self.max_variants:
            what = f"sweep has {self.num_variants:,} variants, and max_variants is {self.max_variants:,}"
            fix = "remove values, draw some with random, or raise sweep.max_variants"
            yield Violation("max_variants", what, fix, involves=(*both, "max_variants"))


def is_logarithmic(key: str) -> bool:
    """Return whether a range of this key is drawn log-uniformly."""
    return key.endswith(_RATE)


def key_path(key: str, dataset_names: Sequence[str]) -> KeyPath | None:
    """Return the path of a swept key in a recipe file; None if it names no dataset of the recipe."""
    parts = key.split(".")
    if parts[0] != DATASETS:
        return tuple(parts)
    if len(parts) < 3 or parts[1] not in dataset_names:
        return None
    return (DATASETS, dataset_names.index(parts[1]), *parts[2:])


def plain_key(key: str) -> str:
    """Return a swept key without the name of the dataset, such as datasets.weight."""
    section, *rest = key.split(".")
    return ".".join((section, *rest[1:])) if section == DATASETS else key


def sweep_violations(
    sweep: SweepSettings, dataset_names: Sequence[str], model: type[BaseModel]
) -> Iterator[Violation]:
    """Yield a violation for each key that cannot vary; `model` is the model of a recipe file."""
    for section, key in sweep.placed_keys:
        place = f"sweep.{section}.{key}"
        path = key_path(key, dataset_names)
        if path is None:
            names = one_of(f"datasets.{name}.weight" for name in dataset_names)
            what = f"a key of a dataset must name it, got {key}"
            yield Violation(place, what, f"write it as in {names}", involves=("sweep", "datasets"))
        elif not _is_known(model, path):
            known = [each for each in all_keys_of(model) if each.split(".")[0] in SWEPT_SECTIONS]
            close = difflib.get_close_matches(plain_key(key), known, n=1)
            fix = f"did you mean {close[0]}?" if close else "write a key as in training.learning_rate"
            yield Violation(place, f"unknown key {key}", fix, involves=("sweep",))
        elif path[0] not in SWEPT_SECTIONS or plain_key(key) in _NOT_SWEPT:
            what = f"a sweep cannot vary {key}, which is a name, a path or no setting of the training"
            fix = f"remove it; keys of {one_of(SWEPT_SECTIONS)} may vary"
            yield Violation(place, what, fix, involves=("sweep",))


def _is_known(model: type[BaseModel], path: KeyPath) -> bool:
    section: type[BaseModel] | None = model
    for part in path:
        if isinstance(part, int):
            continue
        if section is None or (info := keys_of(section).get(part)) is None:
            # Arguments of an optimizer have no fields. They are checked with the recipe of the variant.
            return section is not None and section.model_config.get("extra") == "allow"
        sections = list(sections_in(info.annotation))
        if len(sections) > 1:
            return True
        section = sections[0] if sections else None
    return True
