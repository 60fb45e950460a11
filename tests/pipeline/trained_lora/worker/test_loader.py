from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pytest
import torch

from pipeline.cache.store import Store, TensorSpec
from pipeline.cache.worker.tensors import read_torch
from pipeline.errors import StoreError
from pipeline.models.worker.family import load_family
from pipeline.trained_lora.inputs import TrainingInputs, tensors_json
from pipeline.trained_lora.job import TrainingJob, read_job
from pipeline.trained_lora.plan.random_streams import stream
from pipeline.trained_lora.plan.steps import StepPlan
from pipeline.trained_lora.worker.loader import MicroBatchMaker, loss_weights, micro_inputs, prefetch
from tests.pipeline.trained_lora.runs import run_until

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


CPU = torch.device("cpu")


def maker_of(job: TrainingJob) -> MicroBatchMaker:
    family = load_family(job.base)
    return MicroBatchMaker(job, family, family.noise.load_scheduler())


def test_micro_batches_follow_the_plan_from_any_start(make_project: Callable[..., Project]) -> None:
    job = make_project().job()
    plan = job.plan()
    batches = list(micro_inputs(plan, maker_of(job), rank=0, start=2, pin=False))
    expected = [
        (step.step, tuple(slot.variant_id for slot in micro[0]))
        for step in plan[2:]
        for micro in step.micro_batches
    ]
    assert [(step.step, micro.variant_ids) for step, micro in batches] == expected
    inputs = {item.variant_id: item for item in job.inputs}
    store = Store(job.recipe.cache_dir)
    for _, micro in batches:
        for index, variant_id in enumerate(micro.variant_ids):
            stored = read_torch(store, inputs[variant_id].views[0].entry)["latent"]
            assert torch.equal(micro.latent[index], stored)
            assert torch.equal(micro.to(CPU).latent[index], stored.float())
        assert micro.conditions["crop_top_left"].tolist() == [[2, 0]] * len(micro.variant_ids)
        assert micro.latent.dtype == micro.conditions["text_embedding"].dtype == torch.float16
        on_device = micro.to(CPU)
        floats = (on_device.latent, on_device.noise, on_device.conditions["text_embedding"])
        assert {each.dtype for each in floats} == {torch.float32}
        assert on_device.conditions["crop_top_left"].dtype == torch.int64


def test_L03_a_shape_that_differs_from_the_table_is_an_error_with_the_sample(
    make_project: Callable[..., Project],
) -> None:
    job = make_project().job()
    first = job.inputs[0]
    key = first.views[0].entry.key
    wrong = pl.lit(tensors_json({"latent": TensorSpec("float16", (4, 9, 9))}))
    tensors = pl.when(pl.col("variant_id") == first.variant_id).then(wrong).otherwise("latent_tensors")
    job = replace(job, inputs=TrainingInputs(job.inputs.table.with_columns(latent_tensors=tensors)))
    slot = next(s for step in job.plan() for s in step.slots() if s.variant_id == first.variant_id)
    with pytest.raises(StoreError) as excinfo:
        maker_of(job).make(0, (slot,))
    assert first.variant_id in excinfo.value.where
    assert key in excinfo.value.where


def test_T06_a_missing_embedding_is_an_error_with_its_file_and_is_not_encoded(
    make_project: Callable[..., Project],
) -> None:
    job = make_project(dropout=0.0).job()
    for item in job.inputs:
        Store(job.recipe.cache_dir).path(item.variants[0].entry).unlink()
    with pytest.raises(StoreError, match="read") as excinfo:
        list(micro_inputs(job.plan(), maker_of(job), rank=0, start=0, pin=False))
    assert "text" in excinfo.value.where


def test_T04_training_needs_no_text_encoder_and_no_vae(
    make_project: Callable[..., Project], tmp_path: Path
) -> None:
    """Training works without the files of the VAE and the text encoders."""
    job = make_project(steps=2).job()
    base = shutil.copytree(job.base, tmp_path / "denoiser_only")
    for part in ("text_encoder", "tokenizer", "vae"):
        shutil.rmtree(base / part)
    assert run_until(replace(job, base=base))[0]


def test_a_job_reads_back_as_it_was_written(make_project: Callable[..., Project]) -> None:
    job = make_project(sample_every=2).job()
    assert len(job.prompts) == 2
    assert read_job(job.write()) == job


def test_L12_only_a_few_micro_batches_are_prepared_ahead(
    make_project: Callable[..., Project],
) -> None:
    plan = make_project(steps=50).job().plan()
    started: list[int] = []

    def jobs() -> Iterator[tuple[StepPlan, Callable[[], int]]]:
        for number, batch in plan.iterate():
            started.append(number)
            yield batch, lambda number=number: number

    ahead = prefetch(jobs())
    for taken in range(20):
        assert next(ahead)[1] == taken
        assert len(started) == taken + 4
    ahead.close()
    names = [thread.name for thread in threading.enumerate()]
    assert [name for name in names if name.startswith("latentline-loader")] == []


def test_closing_cancels_what_no_thread_has_begun(make_project: Callable[..., Project]) -> None:
    batch = make_project(steps=1).job().plan()[0]
    closing, begun = threading.Event(), list[int]()

    def task(number: int) -> int:
        begun.append(number)
        if number > 0:
            closing.wait()
            time.sleep(1)  # in which `close` cancels the others
        return number

    ahead = prefetch(((batch, partial(task, number)) for number in range(10)), readers=1)
    assert next(ahead)[1] == 0
    closing.set()
    ahead.close()
    assert begun in ([0], [0, 1])


MASKED = {"masked": {"mask": {"from": "alpha", "unmasked_weight": 0.25}}, "plain": {}}


def test_slots_get_the_weights_of_their_masks_and_others_get_ones(
    make_project: Callable[..., Project],
) -> None:
    job = make_project(datasets=MASKED).job()
    maker = maker_of(job)
    settings = {dataset.name: dataset.mask for dataset in job.recipe.datasets}
    num_masked = num_plain = 0
    for step in range(3):
        for (share,) in job.plan()[step].micro_batches:
            micro = maker.make(step, share)
            fixed = maker.make_fixed(share, [0.5] * len(share))
            items = [job.inputs.named(slot.variant_id) for slot in share]
            if all(item.dataset == "plain" for item in items):
                assert micro.place_weights is None
                continue
            assert micro.place_weights is not None
            assert micro.place_weights.shape == micro.latent[:, :1].shape
            assert fixed.place_weights is not None
            assert torch.equal(fixed.place_weights, micro.place_weights)
            for slot, item, weights in zip(share, items, micro.place_weights, strict=True):
                spec, mask_settings = item.views[slot.view].mask, settings[item.dataset]
                if spec is None or mask_settings is None:
                    assert item.dataset == "plain"
                    assert torch.equal(weights, torch.ones_like(weights))
                    num_plain += 1
                    continue
                stored = read_torch(Store(job.recipe.cache_dir), spec)["mask"].float()
                expected = stored.clamp(min=0.25) / stored.clamp(min=0.25).mean()
                assert torch.equal(weights, expected)
                assert float(weights.mean()) == pytest.approx(1.0, abs=1e-6)
                num_masked += 1
    assert min(num_masked, num_plain) > 0


def test_a_mask_of_another_shape_is_an_error(make_project: Callable[..., Project]) -> None:
    job = make_project(datasets={"masked": MASKED["masked"]}).job()
    wrong = tensors_json({"mask": TensorSpec("float16", (1, 3, 3))})
    table = job.inputs.table.with_columns(mask_tensors=pl.lit(wrong))
    maker = maker_of(replace(job, inputs=TrainingInputs(table)))
    with pytest.raises(StoreError, match="mask"):
        maker.make(0, job.plan()[0].micro_batches[0][0])


def test_several_readers_prepare_one_micro_batch_each(make_project: Callable[..., Project]) -> None:
    batch = make_project(steps=1).job().plan()[0]
    started: list[int] = []

    def jobs() -> Iterator[tuple[StepPlan, Callable[[], int]]]:
        for number in range(20):
            started.append(number)
            yield batch, lambda number=number: number

    ahead = prefetch(jobs(), readers=7)
    assert [next(ahead)[1] for _ in range(3)] == [0, 1, 2]
    assert len(started) == 3 + 6
    assert [number for _, number in ahead] == list(range(3, 20))


def test_a_micro_batch_has_the_facts_of_its_samples(make_project: Callable[..., Project]) -> None:
    datasets = {
        "photos": {"loss_weight": 2.0, "mask": {"from": "alpha", "prior_weight": 0.5}},
        "class": {"role": "prior", "loss_weight": 3.0},
    }
    loss = {"prior": "prediction", "prior_weight": 0.25}
    job = make_project(datasets=datasets, loss=loss, batch_size=4, sizes={"64x64": 4}).job()
    assert loss_weights(job.recipe) == {"photos": 2.0, "class": 0.75}
    (share,) = job.plan()[0].micro_batches[0]
    share = tuple(replace(slot, weight=float(number > 0)) for number, slot in enumerate(share))
    items = [job.inputs.named(slot.variant_id) for slot in share]
    is_prior = [item.dataset == "class" for item in items]
    assert {True, False} == set(is_prior)

    maker = maker_of(job)
    for micro in (maker.make(0, share), maker.make_fixed(share, [0.5] * 4)):
        assert micro.variant_ids == tuple(slot.variant_id for slot in share)
        assert micro.weights.tolist() == [0.0, 1.0, 1.0, 1.0]
        assert micro.loss_weights.tolist() == [0.75 if prior else 2.0 for prior in is_prior]
        assert micro.indices.tolist() == [slot.index for slot in share]
        assert micro.captions == (), "the cache has the embeddings"
        assert micro.lora_scale == 1
        assert micro.is_prior is not None
        assert micro.is_prior.tolist() == is_prior
        assert micro.place_weights is not None
        assert micro.prior_place_weights is not None
        assert [bool(each.any()) for each in micro.prior_place_weights] == [not prior for prior in is_prior]
        assert [bool((each == 1).all()) for each in micro.place_weights] == is_prior
        sizes = {name: micro.conditions[name].tolist() for name in ("original_size_hw", "target_size_hw")}
        assert sizes == {
            "original_size_hw": [list(item.original_size_hw) for item in items],
            "target_size_hw": [list(item.target_size_hw) for item in items],
        }
        assert "references" not in micro.conditions


def test_samples_without_masks_or_prior_images_need_no_prediction_of_the_base_model(
    make_project: Callable[..., Project],
) -> None:
    job = make_project(datasets={"photos": {}, "class": {"role": "prior"}}).job()
    micro = maker_of(job).make(0, job.plan()[0].micro_batches[0][0])
    assert (micro.is_prior, micro.place_weights, micro.prior_place_weights) == (None, None, None)


def test_an_entry_with_a_posterior_gives_a_sample_per_epoch_and_repeat_and_its_mean_for_validation(
    make_project: Callable[..., Project],
) -> None:
    job = make_project(sizes={"64x64": 1}).job()
    (item,) = job.inputs
    spec = item.views[0].entry
    tensor = spec.tensors["latent"]
    moments = spec.holding({"mean": tensor, "std": tensor})
    store, draw = job.store, np.random.default_rng(1)
    mean, std = (draw.random(tensor.shape).astype(np.float16) for _ in range(2))
    store.discard(spec)
    store.write(moments, {"mean": mean, "std": std}, {})
    table = job.inputs.table.with_columns(latent_tensors=pl.lit(tensors_json(moments.tensors)))
    job = replace(job, inputs=TrainingInputs(table))
    maker, slot = maker_of(job), job.plan()[0].micro_batches[0][0][0]

    latents: list[torch.Tensor] = []
    for place in ((0, 0), (1, 0), (0, 1)):
        epoch, occurrence = place
        shown = replace(slot, epoch=epoch, occurrence=occurrence)
        normal = stream(7, "moments", slot.variant_id, epoch, occurrence)
        noise = normal.standard_normal(tensor.shape, dtype=np.float32)
        latents.append(maker.make(0, (shown,)).latent[0])
        expected = mean.astype(np.float32) + std.astype(np.float32) * noise
        torch.testing.assert_close(latents[-1], torch.from_numpy(expected))
    assert not torch.equal(latents[0], latents[1])
    assert torch.equal(maker.make_fixed((slot,), [0.5]).latent[0], torch.from_numpy(mean.astype(np.float32)))
