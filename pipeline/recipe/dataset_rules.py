"""Rules that compare the datasets of a recipe with each other and with its other sections.

Keys of violations are relative to the recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.recipe.buckets import BucketSettings, step_violation
from pipeline.recipe.datasets import DatasetSettings
from pipeline.recipe.settings import Violation
from pipeline.recipe.training import TrainingSettings

Datasets = Sequence[DatasetSettings]


def name_violations(datasets: Datasets) -> Iterator[Violation]:
    """Names must differ in more than case, because some file systems ignore it."""
    first_names: dict[str, str] = {}
    for index, dataset in enumerate(datasets):
        folded = dataset.name.casefold()
        if folded not in first_names:
            first_names[folded] = dataset.name
            continue
        what = f"dataset names must be unique, got {dataset.name} twice"
        if first_names[folded] != dataset.name:
            first = first_names[folded]
            what = f"dataset names must differ in more than case, got {first} and {dataset.name}"
        yield Violation(f"datasets[{index}].name", what, "rename one of the datasets")


def weight_violations(datasets: Datasets, training: TrainingSettings) -> Iterator[Violation]:
    """Either all datasets have a weight or none, and only weights make use of `exhausted`."""
    weights = [dataset.weight for dataset in datasets]
    num_weights = sum(weight is not None for weight in weights)
    exhausted, involves = training.exhausted, ("datasets", "training")
    if not num_weights and exhausted not in (None, "leave"):
        what = f"training.exhausted: {exhausted} requires datasets with weights"
        fix = "give each dataset a weight, or remove exhausted"
        yield Violation("training.exhausted", what, fix, involves)
    elif num_weights and num_weights < len(weights):
        what = f"either all datasets or none must have a weight, got {num_weights} of {len(weights)}"
        fix = "give each dataset a weight, or none"
        yield Violation(f"datasets[{weights.index(None)}]", what, fix, involves)


def resolution_violations(datasets: Datasets, buckets: BucketSettings) -> Iterator[Violation]:
    """Own resolutions are multiples of the step, and `per_image: each` needs several in a dataset."""
    for index, dataset in enumerate(datasets):
        keys = {f"resolutions[{number}]": each for number, each in enumerate(dataset.resolutions)}
        if dataset.resolution is not None:
            keys["resolution"] = dataset.resolution
        for key, resolution in keys.items():
            name = f"datasets[{index}].{key}"
            if violation := step_violation(name, resolution, buckets.step):
                yield violation

    own = [buckets.with_resolutions(each.resolution, each.resolutions) for each in datasets]
    if buckets.per_image == "each" and max(len(each.resolutions) for each in own) < 2:
        what, fix = "per_image: each requires several resolutions", "set resolutions, or remove per_image"
        yield Violation("buckets.per_image", what, fix, involves=("datasets", "buckets"))


def focus_violations(datasets: Datasets, buckets: BucketSettings) -> Iterator[Violation]:
    """`focus_columns` and `crop: focus` need each other."""
    crop, involves = buckets.crop, ("datasets", "buckets")
    with_focus = [index for index, each in enumerate(datasets) if each.focus_columns is not None]
    if crop == "focus" and not with_focus:
        what = "buckets.crop: focus requires a dataset with focus_columns"
        fix = "set datasets[].focus_columns, or use crop: centre"
        yield Violation("buckets.crop", what, fix, involves)
    elif crop != "focus" and with_focus:
        what = f"focus_columns require buckets.crop: focus, got buckets.crop: {crop}"
        fix = "set buckets.crop: focus, or remove focus_columns"
        yield Violation(f"datasets[{with_focus[0]}].focus_columns", what, fix, involves)


def prior_violations(datasets: Datasets, training: TrainingSettings) -> Iterator[Violation]:
    """A dataset must have `role: train`, and settings of the prior loss need one with `role: prior`."""
    roles, involves = [each.role for each in datasets], ("datasets", "training")
    if "train" not in roles:
        what = "at least one dataset must have role: train, got role: prior for all"
        yield Violation("datasets[0].role", what, "remove role: prior from a dataset", involves)
    if "prior" in roles:
        return
    loss = training.loss
    for key in ("prior", "prior_weight"):
        if getattr(loss, key) != type(loss).model_fields[key].default:
            what = f"training.loss.{key} requires a dataset with role: prior"
            fix = "set role: prior for the dataset of the class, or remove this key"
            yield Violation(f"training.loss.{key}", what, fix, involves)


def slider_violations(datasets: Datasets, training: TrainingSettings) -> Iterator[Violation]:
    """A slider needs both ends, and an adapter that can be reversed."""
    scales, involves = [each.slider for each in datasets], ("datasets", "training")
    for scale in (1, -1):
        if scale in scales and -scale not in scales:
            what = f"slider: {scale} requires a dataset with slider: {-scale}, got none"
            fix = f"set slider: {-scale} for the dataset of the opposite, or remove slider"
            yield Violation(f"datasets[{scales.index(scale)}].slider", what, fix, involves)
    if training.lora.dora and any(scales):
        what = "training.lora.dora must be false with datasets[].slider: a DoRA cannot be reversed"
        yield Violation("training.lora.dora", what, "remove dora, or slider from the datasets", involves)
    if training.lora.kind == "oft" and any(scales):
        what = "training.lora.kind must not be oft with datasets[].slider: a rotation cannot be scaled by -1"
        fix = "set kind: lora, or remove slider from the datasets"
        yield Violation("training.lora.kind", what, fix, involves)


def slider_differences(datasets: Datasets, values: Sequence[Mapping[str, Any]]) -> Iterator[Violation]:
    """Datasets with `slider` must have equal `values`, whether their own or the recipe's."""
    # Two images of a pair must be in one bucket, mirrored together, and lose their captions together.
    sliders = [(index, values[index]) for index, each in enumerate(datasets) if each.slider is not None]
    for index, own in sliders:
        first = sliders[0][1]
        for key in (key for key in own if own[key] != first[key]):
            what = f"{key} must be the same for all datasets with slider, got {own[key]} and {first[key]}"
            fix = f"give the datasets with slider the same {key}, or none of their own"
            involves = ("datasets", "buckets", "latents", "text")
            yield Violation(f"datasets[{index}].{key}", what, fix, involves)
