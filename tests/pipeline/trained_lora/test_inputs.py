"""Samples with several captions and latents, from the tables to the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pytest
import torch

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cache.store import Store, TensorSpec
from pipeline.errors import TrainingError
from pipeline.models.worker.family import load_family
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.storage.addresses import Url
from pipeline.storage.atomic import write_atomically
from pipeline.storage.needed_columns import NEEDED
from pipeline.storage.tables import selected
from pipeline.trained_lora.inputs import (
    COLUMNS,
    SIDE_INPUT_COLUMNS,
    TrainingInputs,
    read_inputs,
    tensors_json,
    training_inputs,
    when_exhausted,
    write_inputs,
)
from pipeline.trained_lora.job import TrainingJob, plan_inputs, plan_settings, read_job
from pipeline.trained_lora.plan.steps import TrainingPlan
from pipeline.trained_lora.worker.loader import MicroBatchMaker
from pipeline.trained_lora.worker.noise import make_noise_scheduler
from tests.pipeline.reference_family import with_references
from tests.pipeline.trained_lora.slider_project import slider_project

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


def with_mirrored_rows(latents: pl.DataFrame) -> pl.DataFrame:
    rows = [latents.with_columns(flipped=pl.lit(flag)) for flag in (True, False)]
    return pl.concat(rows)


def test_T07_every_caption_of_a_sample_is_a_variant_in_caption_order(
    make_project: Callable[..., Project],
) -> None:
    project = make_project()
    second = project.text.with_columns(caption="another " + pl.col("caption"), variant=pl.lit(1, pl.Int32))
    text = pl.concat([second, project.text])
    inputs = training_inputs(project.recipe, RecipeEntries(project.recipe), project.latents, text)
    assert len(inputs) == 8
    for item in inputs:
        first, other = item.variants
        assert other.caption == f"another {first.caption}"
        assert first.entry.key != other.entry.key


def test_the_mirrored_view_comes_second_with_a_mirrored_crop(make_project: Callable[..., Project]) -> None:
    project = make_project()
    latents = project.latents.with_columns(
        resized_width=pl.col("target_width") + 10, crop_left=pl.lit(3, pl.Int32)
    )
    entries = RecipeEntries(project.recipe)
    inputs = training_inputs(project.recipe, entries, with_mirrored_rows(latents), project.text)
    assert len(inputs) == 8
    for item in inputs:
        assert [view.crop_top_left for view in item.views] == [(2, 3), (2, 7)]
        assert item.views[1].entry.key != item.views[0].entry.key


def test_samples_are_found_by_name_and_unknown_names_raise_key_errors(
    make_project: Callable[..., Project],
) -> None:
    inputs = make_project().job().inputs
    for number, item in enumerate(inputs):
        assert inputs.number_of(item.variant_id) == number
        assert inputs.named(item.variant_id) == item
        assert inputs[number - len(inputs)] == item
    for name in ("", "photos/64x64-", "~"):
        with pytest.raises(KeyError):
            inputs.named(name)


def test_inputs_need_only_the_listed_columns_and_ignore_row_order_and_chunks(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(datasets={"photos": {"validation_fraction": 0.5}})
    entries, expected = RecipeEntries(project.recipe), project.job().inputs
    latents, text = (
        selected(
            name, pl.concat([rows[5:], rows[:2], rows[2:5]], rechunk=False), NEEDED["trained_lora"][name]
        )
        for name, rows in (("vae_latents", project.latents), ("text_embeddings", project.text))
    )
    assert training_inputs(project.recipe, entries, latents, text) == expected
    parts = [pl.concat([rows[:3], rows[3:]], rechunk=False) for rows in (project.latents, project.text)]
    assert training_inputs(project.recipe, entries, *parts) == expected


def test_inputs_are_sorted_by_variant_id_and_found_whatever_the_names_of_the_samples(
    make_project: Callable[..., Project],
) -> None:
    """`a.png` precedes `a.png (2).png`, but its variants with a bucket in their names follow it."""
    project = make_project(sizes={"64x64": 2, "32x96": 1})
    names = {"64x64-0": "a.png", "32x96-0": "a.png", "64x64-1": "a.png (2).png"}
    ids = {f"photos/{old}.jpg": f"photos/{new}" for old, new in names.items()}
    latents, text = (
        table.with_columns(pl.col("sample_id").replace_strict(ids))
        for table in (project.latents, project.text)
    )
    inputs = training_inputs(
        project.recipe, RecipeEntries(project.recipe), latents, text.unique("sample_id", keep="first")
    )
    expected = ["photos/a.png (2).png", "photos/a.png (32x96)", "photos/a.png (64x64)"]
    assert [item.variant_id for item in inputs] == expected
    assert [inputs.named(name).variant_id for name in expected] == expected


ALL_COLUMNS = {**COLUMNS, **SIDE_INPUT_COLUMNS["masks"], **SIDE_INPUT_COLUMNS["references"]}


@pytest.fixture
def rich(make_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project of images with masks, with references, and with neither, all of them plain and mirrored."""
    with_references(monkeypatch)
    references = [{"path": "/before"}, {"path": "/style"}]
    datasets: dict[str, dict[str, Any]] = {
        "masked": {"mask": {"from": "alpha"}, "repeats": 2},
        "edits": {"references": references},
        "photos": {},
    }
    return make_project(datasets=datasets, sizes={"64x64": 9, "32x96": 3})


def test_every_input_has_the_masks_and_references_of_its_own_dataset(rich: Project) -> None:
    inputs = rich.job().inputs
    assert dict(inputs.table.schema) == ALL_COLUMNS
    counts = {
        item.dataset: (item.repeats, item.views[0].mask is not None, len(item.views[0].references))
        for item in inputs
    }
    assert counts == {"masked": (2, True, 0), "edits": (1, False, 2), "photos": (1, False, 0)}
    shapes = dict(zip(inputs.table["dataset"], inputs.reference_shapes, strict=True))
    assert shapes["masked"] == shapes["photos"] == "" != shapes["edits"]


def test_the_denoiser_sees_the_images_of_references_and_no_masks(rich: Project) -> None:
    num_images = {item.dataset: len(item.views[0].images) for item in rich.job().inputs}
    assert num_images == {"masked": 0, "edits": 2, "photos": 0}


def test_each_view_has_its_own_references_and_the_mirrored_ones_come_second(rich: Project) -> None:
    plain = {item.variant_id: item for item in rich.job().inputs if item.dataset == "edits"}
    both_latents = with_mirrored_rows(rich.latents)
    entries = RecipeEntries(rich.recipe)
    inputs = training_inputs(rich.recipe, entries, both_latents, rich.text)
    edits = [item for item in inputs if item.dataset == "edits"]
    assert len(edits) == len(plain)
    for item in edits:
        first, mirrored = item.views
        assert first == plain[item.variant_id].views[0]
        assert {entry.key for entry in first.references}.isdisjoint(
            entry.key for entry in mirrored.references
        )


def test_inputs_with_entries_of_all_kinds_survive_their_file(rich: Project, tmp_path: Path) -> None:
    inputs, file = rich.job().inputs, tmp_path / "inputs.parquet"
    write_atomically(file, partial(write_inputs, inputs))
    assert read_inputs(file) == inputs
    assert list(read_inputs(file)) == list(inputs)
    entries = [view.entry for item in inputs for view in item.views]
    entries += [view.mask for item in inputs for view in item.views if view.mask is not None]
    entries += [entry for item in inputs for view in item.views for entry in view.references]
    entries += [variant.entry for item in inputs for variant in item.variants]
    assert {entry.kind for entry in entries} == {"latents", "masks", "text"}


@pytest.mark.parametrize("datasets", [["photos"], []], ids=["an image without references", "no image"])
def test_the_columns_do_not_depend_on_the_images_that_remain(rich: Project, datasets: list[str]) -> None:
    latents = rich.latents.filter(pl.col("dataset").is_in(datasets))
    inputs = training_inputs(rich.recipe, RecipeEntries(rich.recipe), latents, rich.text)
    assert len(inputs) == len(latents)
    assert dict(inputs.table.schema) == ALL_COLUMNS
    assert inputs.reference_shapes.to_list() == [""] * len(inputs)
    assert [item.views[0].references for item in inputs] == [()] * len(inputs)


def test_inputs_are_equal_if_their_tables_are(make_project: Callable[..., Project]) -> None:
    inputs = make_project().job().inputs
    assert inputs == TrainingInputs(inputs.table.clone())
    assert inputs != inputs[1:]
    assert inputs != list(inputs)
    assert [item.variant_id for item in inputs[1:]] == [item.variant_id for item in inputs][1:]


def test_inputs_have_the_scale_of_their_side_of_a_slider_and_1_without_one(
    make_project: Callable[..., Project],
) -> None:
    plain = make_project().job().inputs
    assert plain.lora_scales.to_list() == [1] * 8
    assert plain.reference_shapes.to_list() == [""] * 8
    inputs = slider_project(make_project, datasets={"plain": {}}).job().inputs
    expected = {"bright": 1, "dark": -1, "plain": 1}
    assert {item.dataset for item in inputs} == set(expected)
    assert [item.lora_scale for item in inputs] == [expected[item.dataset] for item in inputs]
    assert inputs.lora_scales.to_list() == [item.lora_scale for item in inputs]


def test_a_sample_of_a_dataset_that_the_recipe_lacks_is_an_error(
    make_project: Callable[..., Project],
) -> None:
    project = make_project()
    first = project.latents["sample_id"].min()
    is_first = pl.col("sample_id") == first
    latents = project.latents.with_columns(
        dataset=pl.when(is_first).then(pl.lit("gone")).otherwise("dataset")
    )
    with pytest.raises(TrainingError) as excinfo:
        training_inputs(project.recipe, RecipeEntries(project.recipe), latents, project.text)
    assert excinfo.value.where == first


def test_a_sample_without_a_caption_is_an_error_that_names_the_sample(
    make_project: Callable[..., Project],
) -> None:
    project = make_project()
    missing_id = project.latents["sample_id"].min()
    text = project.text.filter(pl.col("sample_id") != missing_id)
    with pytest.raises(TrainingError) as excinfo:
        training_inputs(project.recipe, RecipeEntries(project.recipe), project.latents, text)
    assert excinfo.value.where == missing_id


def with_views_and_variants(project: Project) -> TrainingJob:
    """Return a job with two captions and two latents per sample; variant 1 and the mirror are all ones."""
    entries = RecipeEntries(project.recipe)
    second = project.text.with_columns(caption="another " + pl.col("caption"), variant=pl.lit(1, pl.Int32))
    text = pl.concat([second, project.text])
    inputs = training_inputs(project.recipe, entries, with_mirrored_rows(project.latents), text)
    for item in inputs:
        for spec in (item.views[1].entry, item.variants[1].entry):
            ones = {name: np.ones(tensor.shape, tensor.dtype) for name, tensor in spec.tensors.items()}
            entries.store.write(spec, ones, {"made_by": "a test"})
    return TrainingJob(project.recipe, entries.model_folder, "run", inputs, entries.text_spec(""), prompts=())


def test_H05_the_addresses_of_shards_have_no_query_string_in_the_folder_of_a_run(
    make_project: Callable[..., Project],
) -> None:
    job = make_project().job()
    address = Url("zip://shards/a.tar::https://server/all.zip?token=s3cr3t")
    recipe = job.recipe.model_copy(update={"packed_paths": (("photos", address),)})
    file = dataclasses.replace(job, recipe=recipe).write()
    assert "s3cr3t" not in file.read_text(encoding="utf-8")
    assert str(read_job(file).recipe.packed["photos"]).startswith(
        "zip://shards/a.tar::https://server/all.zip"
    )


def maker_of(job: TrainingJob) -> MicroBatchMaker:
    family = load_family(job.base)
    return MicroBatchMaker(job, family, make_noise_scheduler(family, job.recipe.training))


def test_a_batch_contains_the_variant_and_view_that_the_plan_selected(
    make_project: Callable[..., Project],
) -> None:
    job = with_views_and_variants(make_project(dropout=0.0, steps=30))
    assert read_job(job.write()) == job
    maker, choices = maker_of(job), set[tuple[int, int]]()
    for step, batch in job.plan().iterate():
        for micro in batch.micro_batches:
            batch_inputs = maker.make(step, micro[0])
            for at, slot in enumerate(micro[0]):
                choices.add((slot.variant, slot.view))
                assert bool((batch_inputs.latent[at] == 1).all()) == (slot.view == 1)
                assert bool((batch_inputs.conditions["text_embedding"][at] == 1).all()) == (slot.variant == 1)
    assert choices == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_cached_moments_give_a_new_reproducible_latent_in_each_epoch(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(steps=12, sizes={"64x64": 2}, batch_size=2, gradient_accumulation=1)
    job, store = project.job(), Store(project.recipe.cache_dir)
    shape = (4, 8, 8)
    moments = {name: TensorSpec("float32", shape) for name in ("mean", "std")}
    inputs = TrainingInputs(job.inputs.table.with_columns(latent_tensors=pl.lit(tensors_json(moments))))
    for item in inputs:
        spec = item.views[0].entry
        store.path(spec).unlink()
        store.write(spec, {"mean": np.full(shape, 5, "f4"), "std": np.full(shape, 0.5, "f4")}, {})
    job = TrainingJob(job.recipe, job.base, job.run, inputs, job.empty_text, job.prompts)
    batches = [maker_of(job).make(step, batch.micro_batches[0][0]) for step, batch in job.plan().iterate()]
    second = maker_of(job).make(3, job.plan()[3].micro_batches[0][0])
    assert torch.equal(second.latent, batches[3].latent)
    values = torch.stack([micro.latent for micro in batches])
    assert not torch.equal(values[0], values[1])
    # For 6144 draws, both the mean and the deviation must be within 5 standard errors.
    assert abs(float(values.mean()) - 5) < 5 * 0.5 / 6144**0.5
    assert abs(float(values.std()) - 0.5) < 5 * 0.5 / (2 * 6144) ** 0.5


def test_the_holdout_is_the_same_in_every_run_and_is_never_trained_on(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(sizes={"64x64": 200}, datasets={"photos": {"validation_fraction": 0.2}}, steps=400)
    job = project.job()
    held_out = {item.variant_id for item in job.inputs.held_out}
    # 200 draws of 0.2 have a standard deviation of 5.7, so 20 is more than three deviations.
    assert 20 <= len(held_out) <= 60
    assert len(job.inputs.trained) + len(held_out) == 200
    assert not held_out & {sample.variant_id for sample in job.plan().inputs}
    assert {item.variant_id for item in project.changed("other", seed=8).job().inputs.held_out} == held_out
    fewer = project.latents.sample(fraction=0.5, seed=1)
    second = training_inputs(project.recipe, RecipeEntries(project.recipe), fewer, project.text)
    remaining = set(fewer["sample_id"])
    assert {item.variant_id for item in second if item.held_out} == held_out & remaining
    copies = project.latents.with_columns(duplicate_group=pl.lit("0" * 64))
    same = training_inputs(project.recipe, RecipeEntries(project.recipe), copies, project.text)
    assert len({item.held_out for item in same}) == 1


def mixed(sizes: dict[str, tuple[int, int, float | None]], **training: Any) -> tuple[Recipe, TrainingInputs]:
    """Return a recipe and its inputs for datasets with (images, repeats, weight)."""
    datasets = [
        {"name": name, "path": f"/{name}", "repeats": repeats, "weight": weight}
        for name, (_, repeats, weight) in sizes.items()
    ]
    values = {"datasets": datasets, "output_dir": "/out", "model": {"base": "b"}, "training": training}
    names = [
        (f"{name}/{number:03}", name, repeats)
        for name, (images, repeats, _) in sizes.items()
        for number in range(images)
    ]
    columns = {"variant_id": pl.String, "dataset": pl.String, "repeats": pl.Int32}
    table = pl.DataFrame(names, schema=columns, orient="row").sort("variant_id")
    one = pl.lit(["one"], pl.List(pl.String))
    table = table.with_columns(bucket=pl.lit("64x64"), captions=one, latents=one, held_out=pl.lit(False))
    return recipe_from_mapping("x", values), TrainingInputs(table)


def shares(recipe: Recipe, inputs: TrainingInputs) -> dict[str, float]:
    """Return each dataset's share of the samples in the recipe's plan."""
    plan = TrainingPlan(plan_inputs(inputs), plan_settings(recipe, inputs))
    seen = inputs.table.with_columns(seen=pl.Series(plan.times_seen()))
    sums = seen.group_by("dataset").agg(pl.col("seen").sum())
    return {name: number / sums["seen"].sum() for name, number in sums.iter_rows()}


@pytest.mark.parametrize(
    "sizes",
    [
        {"a": (10, 2, 3.0), "b": (40, 1, 1.0)},
        {"a": (3, 1, 1.0), "b": (90, 1, 1.0)},
        {"a": (7, 1, 0.2), "b": (5, 3, 0.5), "c": (31, 1, 0.3)},
        {"a": (1, 1, 9.0), "b": (60, 4, 1.0)},
        {"a": (12, 1, 2.5)},
    ],
    ids=str,
)
def test_weights_are_the_shares_of_datasets_whatever_their_sizes(
    sizes: dict[str, tuple[int, int, float | None]],
) -> None:
    total = sum(weight or 0.0 for _, _, weight in sizes.values())
    expected = {name: (weight or 0.0) / total for name, (_, _, weight) in sizes.items()}
    assert shares(*mixed(sizes, steps=2000)) == pytest.approx(expected, abs=0.005)


def test_leave_follows_the_weights_in_order_only_and_is_used_where_no_dataset_is_exhausted() -> None:
    sizes = {"a": (10, 2, 3.0), "b": (40, 1, 1.0)}
    assert shares(*mixed(sizes, steps=600, exhausted="leave")) == pytest.approx({"a": 1 / 3, "b": 2 / 3})
    assert when_exhausted(*mixed(sizes)) == "repeat"
    assert when_exhausted(*mixed(sizes, exhausted="end_epoch")) == "end_epoch"

    # Datasets of sizes in proportion to their weights end together, and their runs keep the ids of 0.3.0.
    assert when_exhausted(*mixed({"a": (10, 1, None), "b": (40, 1, None)})) == "leave"
    assert when_exhausted(*mixed({"a": (10, 1, 0.1), "b": (30, 1, 0.3)})) == "leave"
    for equal in ({"a": (10, 2, 1.0), "b": (20, 1, 1.0)}, {"a": (9, 1, 0.5), "b": (27, 1, 1.5)}):
        recipe, inputs = mixed(equal, steps=70)
        assert when_exhausted(recipe, inputs) == "leave"
        repeat = mixed(equal, steps=70, exhausted="repeat")[0]
        plans = [TrainingPlan(plan_inputs(inputs), plan_settings(each, inputs)) for each in (recipe, repeat)]
        assert list(plans[0]) == list(plans[1])
