from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from diffusers import DDPMScheduler, UNet2DConditionModel

from pipeline.cache.store import Store
from pipeline.cache.worker.tensors import read_torch
from pipeline.models.worker.family import load_family
from pipeline.trained_lora.plan.random_streams import stream
from pipeline.trained_lora.plan.steps import Slot
from pipeline.trained_lora.worker.adapter.lora import adapter_state
from pipeline.trained_lora.worker.engine import Engine
from pipeline.trained_lora.worker.loader import MicroBatchMaker
from pipeline.trained_lora.worker.micro_input import MicroInput
from pipeline.trained_lora.worker.paired_validation import MAX_PAIRS, PairedValidation, pairs_of
from pipeline.trained_lora.worker.validation import NOISE_LEVELS, Validation
from tests.tensor_differences import differing_tensors

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


def test_the_loss_is_measured_at_the_centres_of_five_equal_ranges_of_noise_levels() -> None:
    assert pytest.approx([(index + 0.5) / 5 for index in range(5)]) == NOISE_LEVELS


HALF = {"photos": {"validation_fraction": 0.5}}


def test_the_validation_loss_equals_an_independent_computation_at_fixed_noise(
    make_project: Callable[..., Project],
) -> None:
    job = make_project(datasets=HALF, batch_size=3).job()
    family = load_family(job.base)
    engine = Engine(job, family)
    losses = Validation(job, family, job.inputs.held_out).loss(engine)
    assert set(losses.by_variant) == {item.variant_id for item in job.inputs.held_out}

    unet = UNet2DConditionModel.from_pretrained(job.base / "unet").eval()
    ddpm = DDPMScheduler.from_pretrained(job.base / "scheduler")
    store = Store(job.recipe.cache_dir)
    table: list[list[float]] = []
    for item in job.inputs.held_out:
        latent = read_torch(store, item.views[0].entry)["latent"].float()[None]
        text = read_torch(store, item.variants[0].entry)["text_embedding"].float()[None]
        row: list[float] = []
        for level in NOISE_LEVELS:
            shape = tuple(latent.shape[1:])
            noise = stream("fixed noise", item.variant_id, str(level)).standard_normal(shape, dtype="float32")
            noise = torch.from_numpy(noise)[None]
            at = torch.tensor([int(level * ddpm.config.num_train_timesteps)])
            with torch.no_grad():  # a fresh LoRA adds nothing
                answer = unet(ddpm.add_noise(latent, noise, at), at, text).sample
            row.append(float(((answer - noise) ** 2).mean()))
        table.append(row)
        assert losses.by_variant[item.variant_id] == pytest.approx(sum(row) / len(row), rel=1e-4)
    errors = torch.tensor(table)
    assert losses.mean == pytest.approx(float(errors.mean()), rel=1e-4)
    assert losses.by_level == pytest.approx(errors.mean(dim=0).tolist(), rel=1e-4)


def test_the_validation_loss_does_not_depend_on_seed_loss_or_batch_size_and_changes_no_weight(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(datasets=HALF)
    loss = project.recipe.training.loss.model_copy(update={"kind": "huber", "weighting": "min_snr"})
    other = project.changed("other", seed=8, batch_size=4, loss=loss).job()
    job = project.job()
    losses = []
    for each in (job, other):
        family = load_family(each.base)
        engine = Engine(each, family)
        before = adapter_state(engine.denoiser)
        validation = Validation(each, family, each.inputs.held_out)
        losses.append(validation.loss(engine))
        assert validation.loss(engine) == losses[-1]
        assert engine.denoiser.training
        assert differing_tensors(adapter_state(engine.denoiser), before) == []
    assert losses[0].mean == pytest.approx(losses[1].mean, rel=1e-5)


def test_a_pair_measures_a_trained_image_with_the_noise_of_a_held_out_one(
    make_project: Callable[..., Project],
) -> None:
    job = make_project(datasets=HALF, batch_size=3).job()
    family = load_family(job.base)
    engine = Engine(job, family)
    held_out, trained = job.inputs.held_out, job.inputs.trained
    paired = PairedValidation(job, family)
    assert len(paired.pairs) >= 2
    assert paired.pairs == sorted(paired.pairs), "the order of the contents, not chance"

    maker = MicroBatchMaker(job, family, engine.noise_scheduler)
    losses: list[tuple[float, float]] = []
    measured = Validation(job, family, held_out).loss(engine)
    for left, right in paired.pairs:
        a, b = held_out[left], trained[right]
        assert (a.dataset, a.bucket) == (b.dataset, b.bucket)
        row: list[float] = []
        for level in NOISE_LEVELS:
            slots = (Slot(a.variant_id, 0, 0, 0, False), Slot(b.variant_id, 0, 0, 0, False))
            # Alone, the trained image has noise of its own.
            own = maker.make_fixed(slots[1:], [level])
            both = [maker.make_fixed((slot,), [level], noise_of=[a.identity]) for slot in slots]
            assert torch.equal(both[0].noise, maker.make_fixed(slots[:1], [level]).noise)
            assert torch.equal(both[0].noise, both[1].noise)
            assert not torch.equal(own.noise, both[1].noise)
            assert torch.equal(own.latent, both[1].latent)
            row.append(float(engine.objective.errors(both[1], engine.noise_scheduler)[0]))
        losses.append((measured.by_variant[a.variant_id], sum(row) / len(row)))

    before, random_state = adapter_state(engine.denoiser), torch.get_rng_state()
    loss = paired.loss(engine, measured)
    assert loss is not None
    assert differing_tensors(adapter_state(engine.denoiser), before) == []
    assert torch.equal(torch.get_rng_state(), random_state), "training draws the same random numbers"
    assert engine.denoiser.training
    expected = torch.tensor(losses, dtype=torch.float64).mean(dim=0)
    assert loss.trained == pytest.approx(float(expected[1]), rel=1e-4)
    assert loss.gap == pytest.approx(float(expected[0] - expected[1]), abs=1e-5)


def test_images_are_paired_once_within_their_dataset_and_bucket(make_project: Callable[..., Project]) -> None:
    datasets = {"photos": {"validation_fraction": 0.7}, "drawings": {"validation_fraction": 0.3}}
    inputs = make_project(datasets=datasets, sizes={"64x64": 40, "32x96": 8}).job().inputs
    held_out, trained = inputs.held_out, inputs.trained
    pairs = pairs_of(held_out, trained)
    lefts, rights = zip(*pairs, strict=True)
    assert len(set(lefts)) == len(set(rights)) == len(pairs) <= MAX_PAIRS
    for left, right in pairs:
        a, b = held_out[left], trained[right]
        assert (a.dataset, a.bucket, b.held_out) == (b.dataset, b.bucket, False)
    assert pairs_of(trained, trained[:0]) == []
    numbers = [(item.dataset, item.bucket) for item in held_out]
    free = [(item.dataset, item.bucket) for item in trained]
    possible = sum(min(numbers.count(group), free.count(group)) for group in set(numbers))
    assert len(pairs) == min(MAX_PAIRS, possible)


@dataclass
class CountingEngine:
    """An engine of one rank that gives each cell its index as error, and counts its forward passes."""

    process_index: int
    num_processes: int
    is_sharded: bool
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    passes: int = 0

    @property
    def accelerator(self) -> CountingEngine:
        return self

    @property
    def objective(self) -> CountingEngine:
        return self

    def errors(self, micro: MicroInput, scheduler: object) -> torch.Tensor:
        self.passes += 1
        return micro.indices.float()

    def reduce(self, errors: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "sum"
        return errors


@pytest.mark.parametrize("sharded", [False, True])
def test_the_ranks_measure_each_cell_once_and_run_a_sharded_model_equally_often(
    make_project: Callable[..., Project], sharded: bool
) -> None:
    """A forward pass of a sharded model waits for those of all other ranks."""
    job = make_project(datasets=HALF, batch_size=3).job()
    validation = Validation(job, load_family(job.base), job.inputs.held_out)

    def measured(num_ranks: int) -> tuple[list[int], float]:
        engines = [CountingEngine(rank, num_ranks, sharded) for rank in range(num_ranks)]
        total = sum(validation.loss(cast("Any", engine)).mean for engine in engines)
        return [engine.passes for engine in engines], total

    (alone,), loss = measured(1)
    assert alone >= 5
    for num_ranks in range(2, alone + 2):
        passes, total = measured(num_ranks)
        assert total == pytest.approx(loss)
        if sharded:
            assert passes == [-(-alone // num_ranks)] * num_ranks
        else:
            assert sum(passes) == alone


def test_output_change_is_zero_for_a_fresh_adapter_and_grows_with_its_weights(
    make_project: Callable[..., Project],
) -> None:
    job = make_project().job()
    family = load_family(job.base)
    engine = Engine(job, family)
    maker = MicroBatchMaker(job, family, engine.noise_scheduler)
    slot = Slot(job.inputs[0].variant_id, 0, epoch=0, occurrence=0, drop_caption=False)
    micro = maker.make_fixed((slot,), [0.5]).to(engine.accelerator.device)
    assert engine.objective.output_change(micro) == 0.0
    moved = []
    for amount in (0.01, 0.1):
        with torch.no_grad():
            for weight in engine.weights:
                weight.add_(amount)
        moved.append(engine.objective.output_change(micro))
    assert 0 < moved[0] < moved[1]
    with engine.objective.evaluation():
        adapted = engine.objective.predict_noisy(micro, engine.noise_scheduler)
        unet = UNet2DConditionModel.from_pretrained(job.base / "unet").eval()
        noisy = family.noise.add_noise(engine.noise_scheduler, micro.latent, micro.noise, micro.timesteps)
        plain = unet(noisy, micro.timesteps, micro.conditions["text_embedding"]).sample
    assert moved[1] == pytest.approx(float((adapted - plain).norm() / plain.norm()), rel=1e-4)
