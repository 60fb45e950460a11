"""The sample order never changes, because resumed runs and run ids depend on it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl
import pytest

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.trained_lora.inputs import training_inputs
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.plan.random_streams import hash_bits, stream

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

THREE: dict[str, dict[str, Any]] = {
    "photos": {"repeats": 2, "validation_fraction": 0.3},
    "Drawn": {"repeats": 1},
    "scans": {"repeats": 3, "validation_fraction": 0.2},
}
WEIGHTED: dict[str, dict[str, Any]] = {"a": {"weight": 3.0}, "b": {"weight": 1.0, "repeats": 2}}
SIZES = {"64x64": 17, "32x96": 9, "96x32": 4}


def several_captions(project: Project) -> None:
    """Add a second caption to every sample and a third caption to some samples."""
    more = [project.text.with_columns(caption=f"{n} " + pl.col("caption"), variant=n) for n in (1, 2)]
    more = [part.cast({"variant": pl.Int32}) for part in more]
    some = more[1].filter(pl.col("sample_id").str.ends_with("4.jpg"))
    project.text = pl.concat([some, project.text, more[0]])


def mirrored_too(project: Project) -> None:
    rows = project.latents.with_columns(resized_width=pl.col("resized_width") + 6)
    project.latents = pl.concat([rows.with_columns(flipped=flag) for flag in (True, False)])


def each_resolution(project: Project) -> None:
    """Add a second sample for every image in the first bucket."""
    first = project.latents.filter(pl.col("bucket") == "64x64")
    project.latents = pl.concat([first.with_columns(bucket=pl.lit("64x96")), project.latents])


def odd_names(project: Project) -> None:
    """Rename some samples to non-ASCII names, one of them outside the Basic Multilingual Plane."""
    for old, new in (("-1.jpg", "-\U0001d11e.jpg"), ("-2.jpg", "-\uff5e.jpg"), ("-3.jpg", "-É.jpg")):
        named = pl.col("sample_id").str.replace(old, new, literal=True)
        project.latents, project.text = (rows.with_columns(named) for rows in (project.latents, project.text))


def everything(project: Project) -> None:
    odd_names(project)
    several_captions(project)
    mirrored_too(project)
    each_resolution(project)


def untouched(project: Project) -> None:
    pass


def job_of(project: Project) -> TrainingJob:
    entries = RecipeEntries(project.recipe)
    inputs = training_inputs(project.recipe, entries, project.latents, project.text)
    return TrainingJob(project.recipe, entries.model_folder, "run", inputs, entries.text_spec(""), ())


def fingerprint(job: TrainingJob) -> str:
    """Return a hash of everything that decides the batches, except entry keys, which depend on the model."""
    digest = hashlib.sha256()

    def add(*values: Any) -> None:
        digest.update(json.dumps(values).encode() + b"\n")

    for item in job.inputs:
        add(item.variant_id, item.sample_id, item.dataset, item.bucket, item.repeats, item.held_out)
        add(item.original_size_hw, item.target_size_hw, [view.crop_top_left for view in item.views])
        add([variant.caption for variant in item.variants])
    plan = job.plan()
    for step, batch in plan.iterate():
        add(step, batch.step, batch.epoch, batch.num_samples)
        for rank_shares in batch.micro_batches:
            for rank, share in enumerate(rank_shares):
                for slot in share:
                    add(rank, slot.variant_id, slot.index, slot.epoch, slot.occurrence, slot.weight)
                    add(slot.drop_caption, slot.variant, slot.view)
    add(plan.numbers(), [plan.dropped(epoch) for epoch in range(plan.num_epochs)])
    return digest.hexdigest()[:16]


class Case(NamedTuple):
    """A recipe with its tables, and its fingerprint as of 2026-11-21."""

    name: str
    change: Callable[[Project], None]
    datasets: dict[str, dict[str, Any]]
    buckets: dict[str, Any]
    processes: int
    expected: str

    def project(self, make_project: Callable[..., Project]) -> Project:
        exhausted = self.name.split(", ")[1] if self.name.startswith("weights") else "leave"
        project = make_project(
            sizes=SIZES, datasets=self.datasets, batch_size=3, steps=40, exhausted=exhausted
        )
        recipe = project.recipe
        sections = {
            "buckets": recipe.buckets.model_copy(update=self.buckets),
            "accelerate": recipe.accelerate.model_copy(update={"num_processes": self.processes}),
        }
        project.recipe = recipe.model_copy(update=sections)
        self.change(project)
        return project


DROP, REPEAT = {"underfilled": "drop"}, {"underfilled": "repeat"}

CASES = [
    Case("plain", odd_names, {"photos": {}}, {}, 1, "5d1302f31edba3f9"),
    Case("repeats and several datasets", untouched, THREE, {}, 1, "d5ba900876c65187"),
    Case("several captions", several_captions, {"photos": {"repeats": 2}}, {}, 2, "b7e535672116464e"),
    Case("mirrored views", mirrored_too, {"photos": {}}, {}, 1, "c68d5535c6550b88"),
    Case("each resolution", each_resolution, THREE, {}, 2, "eaedffa28bb33d6c"),
    Case("filled up", everything, THREE, REPEAT, 2, "384963df2aca9f3d"),
    Case("dropped", everything, THREE, DROP, 1, "d7228eee11a72acc"),
    Case("weights, leave", everything, WEIGHTED, {}, 1, "5037d62450061ffb"),
    Case("weights, end_epoch", everything, WEIGHTED, {}, 1, "5728e1a5cf910706"),
    Case("weights, repeat", everything, WEIGHTED, {}, 1, "0b4e724b56012958"),
    Case("weights, leave, dropped", untouched, WEIGHTED, DROP, 1, "18bc100ca56fe910"),
    Case("weights, end_epoch, dropped", untouched, WEIGHTED, DROP, 1, "4cf0b80db1d323b1"),
    Case("weights, repeat, filled up", everything, WEIGHTED, REPEAT, 2, "6a99552e7c8e4385"),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_R01_every_batch_contains_the_same_samples_as_in_earlier_versions(
    make_project: Callable[..., Project], case: Case
) -> None:
    assert fingerprint(job_of(case.project(make_project))) == case.expected


def test_R01_numbers_that_are_drawn_from_a_stream_are_those_of_earlier_versions() -> None:
    """A resumed run draws the noise of its remaining steps, and compares nothing with the steps before."""
    assert hash_bits(64, 7, "noise", 3) == 0xB8C9A4CDFBB644F7
    numbers = stream(7, "noise", 3, 1).integers(0, 2**32, 3)
    assert numbers.tolist() == [1654076329, 1744450085, 3923141988]
