"""References of training inputs: which of them share a batch, and what the denoiser gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import polars as pl
import pytest
import torch
from accelerate import Accelerator

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cache.store import Store
from pipeline.cache.worker.tensors import read_torch
from pipeline.models.worker.family import load_family
from pipeline.trained_lora.fingerprint import run_facts, run_id
from pipeline.trained_lora.inputs import (
    TrainingInput,
    read_inputs,
    training_inputs,
    write_inputs,
)
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.worker.before_training import largest_step
from pipeline.trained_lora.worker.loader import MicroBatchMaker
from pipeline.trained_lora.worker.micro_input import MicroInput
from pipeline.trained_lora.worker.validation import Validation
from tests.pipeline.reference_family import with_references
from tests.tensor_differences import differing_tensors

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

BOTH: list[dict[str, Any]] = [{"path": "/before"}, {"path": "/style"}]


@pytest.fixture
def referenced(make_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project of one dataset with two references, of several shapes, and one without references."""
    with_references(monkeypatch)
    datasets = {"edits": {"references": BOTH}, "photos": {}}
    return make_project(datasets=datasets, sizes={"64x64": 9, "32x96": 3}, steps=12)


def maker_of(job: TrainingJob) -> MicroBatchMaker:
    family = load_family(job.base)
    return MicroBatchMaker(job, family, family.noise.load_scheduler())


def shapes(item: TrainingInput) -> list[tuple[int, ...]]:
    return [entry.tensors["latent"].shape for entry in item.views[0].references]


def facts_of(project: Project) -> dict[str, Any]:
    return run_facts(project.recipe, RecipeEntries(project.recipe), project.job().inputs)


def test_inputs_have_the_references_of_the_table_in_order_and_survive_their_file(
    referenced: Project, tmp_path: Path
) -> None:
    inputs = referenced.job().inputs
    keys = dict(referenced.latents.select("sample_id", "reference_keys").iter_rows())
    for item in inputs:
        expected = (keys[item.sample_id] or "").split()
        assert [entry.key for entry in item.views[0].references] == expected
        assert len(expected) == (2 if item.dataset == "edits" else 0)
    assert len({tuple(shapes(item)) for item in inputs}) == 3

    with (tmp_path / "inputs.parquet").open("w+b") as file:
        write_inputs(inputs, file)
    assert read_inputs(tmp_path / "inputs.parquet") == inputs


def test_the_order_of_rows_does_not_decide_which_view_gets_the_mirrored_references(
    referenced: Project,
) -> None:
    entries = RecipeEntries(referenced.recipe)
    latents = pl.concat([referenced.latents.with_columns(flipped=pl.lit(flag)) for flag in (False, True)])
    inputs, reversed_inputs = (
        training_inputs(referenced.recipe, entries, rows, referenced.text)
        for rows in (latents, latents.reverse())
    )
    plain, mirrored = next(item.views for item in inputs if item.dataset == "edits")
    assert plain.references != mirrored.references
    different = [
        item.variant_id for item, other in zip(inputs, reversed_inputs, strict=True) if item != other
    ]
    assert different == [], "inputs that depend on the order of rows"


def test_a_micro_batch_has_one_number_and_shape_of_references_which_are_the_cached_ones(
    referenced: Project,
) -> None:
    job = referenced.job()
    maker, store = maker_of(job), Store(job.recipe.cache_dir)
    seen: set[tuple[tuple[int, ...], ...]] = set()
    sizes: set[int] = set()
    for step in job.plan():
        for micro in step.micro_batches:
            items = [job.inputs.named(slot.variant_id) for slot in micro[0]]
            (of_batch,) = {tuple(shapes(item)) for item in items}
            seen.add(of_batch)
            sizes.add(len(items))
            conditions = maker.make(step.step, micro[0]).to(torch.device("cpu")).conditions
            assert ("references" in conditions) == bool(of_batch)
            for number, tensor in enumerate(conditions.get("references", ())):
                assert tensor.dtype == torch.float32
                stored = [read_torch(store, item.views[0].references[number]) for item in items]
                assert torch.equal(tensor, torch.stack([each["latent"].float() for each in stored]))
    assert len(seen) == 3
    assert sizes == {1, 2}


def test_two_processes_get_the_references_of_one(referenced: Project) -> None:
    one, two = referenced.job(), referenced.changed("two", num_processes=2, batch_size=1).job()
    maker = maker_of(one)
    for alone, shared in zip(one.plan(), two.plan(), strict=True):
        for micro, of_ranks in zip(alone.micro_batches, shared.micro_batches, strict=True):
            expected = maker.make(alone.step, micro[0]).conditions.get("references", ())
            parts = [maker.make(alone.step, share).conditions.get("references", ()) for share in of_ranks]
            # A rank without a sample gets the first one again, with weight 0.
            joined = tuple(torch.cat(each)[: len(micro[0])] for each in zip(*parts, strict=True))
            assert len(joined) == len(expected)
            assert differing_tensors(joined, expected) == [], f"step {alone.step}"


def test_copies_to_a_device_include_the_references(referenced: Project) -> None:
    job = referenced.job()
    slot = next(slot for step in job.plan() for slot in step.slots() if slot.variant_id.startswith("edits"))
    micro = maker_of(job).make(0, (slot,))
    on_meta = micro.to(torch.device("meta"))
    assert {each.device.type for each in on_meta.conditions["references"]} == {"meta"}
    assert [each.shape for each in on_meta.conditions["references"]] == [
        each.shape for each in micro.conditions["references"]
    ]
    assert on_meta.variant_ids == micro.variant_ids
    assert on_meta.latent.device.type == "meta"


def test_E01_swapping_two_references_changes_the_run_id_and_the_conditions(referenced: Project) -> None:
    job, facts = referenced.job(), facts_of(referenced)
    slot = next(slot for step in job.plan() for slot in step.slots() if slot.variant_id.startswith("edits"))
    before = maker_of(job).make(0, (slot,)).conditions["references"]

    # As validated_dataset would write them for a recipe with the two in the other order.
    images = [
        None if each is None else json.dumps(json.loads(each)[::-1])
        for each in referenced.latents["reference_images"]
    ]
    latents = referenced.latents.with_columns(reference_images=pl.Series(images, dtype=pl.String))
    swapped = replace(referenced, latents=latents)
    after = maker_of(swapped.job()).make(0, (slot,)).conditions["references"]
    assert len(before) == 2
    assert [each.tolist() for each in after] == [each.tolist() for each in reversed(before)]

    other = facts_of(swapped)
    assert other["samples"]["references"] != facts["samples"]["references"]
    assert run_id(other) != run_id(facts)
    assert {**other, "samples": None} == {**facts, "samples": None}


def test_a_recipe_without_references_has_no_fact_of_them_and_the_plan_of_before(
    make_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_project(datasets={"edits": {}, "photos": {}}, steps=12)
    facts, plan = facts_of(plain), [*plain.job().plan()]
    assert "references" not in facts["samples"]
    assert "references" not in plain.job().inputs.table.columns
    with_references(monkeypatch)
    assert facts_of(plain) == facts
    assert [*plain.job().plan()] == plan


def test_references_of_held_out_images_are_measured_but_never_trained_on(
    make_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_references(monkeypatch)
    datasets = {"edits": {"references": BOTH, "validation_fraction": 0.4}}
    project = make_project(datasets=datasets, sizes={"64x64": 12}, steps=12)
    job = project.job()
    held_out = {item.variant_id for item in job.inputs.held_out}
    assert 0 < len(held_out) < 12
    trained = {slot.variant_id for step in job.plan() for slot in step.slots()}
    assert not trained & held_out
    reserved = {entry.key for item in job.inputs.held_out for entry in item.views[0].references}
    used = {entry.key for name in trained for entry in job.inputs.named(name).views[0].references}
    assert not reserved & used

    measured = Validation(job, load_family(job.base), job.inputs.held_out)
    numbers: dict[str, int] = {}

    class Objective:
        def errors(self, micro: MicroInput, scheduler: object) -> torch.Tensor:
            numbers.update(dict.fromkeys(micro.variant_ids, len(micro.conditions["references"])))
            return torch.ones(len(micro.variant_ids))

    class Engine:
        accelerator = Accelerator(cpu=True)
        is_sharded = False
        objective = Objective()

    measured.loss(cast("Any", Engine()))
    assert numbers == dict.fromkeys(held_out, 2)


def test_the_trial_step_is_the_one_with_the_most_values_including_references(referenced: Project) -> None:
    job = referenced.job()
    step = largest_step(job.plan(), job.inputs)
    largest = max(len(shapes(job.inputs.named(slot.variant_id))) for slot in step.slots())
    assert largest == 2
