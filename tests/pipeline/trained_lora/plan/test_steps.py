from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import TrainingError
from pipeline.trained_lora.plan.batching import Underfilled
from pipeline.trained_lora.plan.inputs import PlanInput, PlanInputs
from pipeline.trained_lora.plan.mixing import Exhausted
from pipeline.trained_lora.plan.steps import PlanSettings, Slot, StepPlan, TrainingPlan


def settings_of(
    steps: int = 12,
    batch: int = 2,
    accumulation: int = 1,
    ranks: int = 1,
    dropout: float = 0.25,
    seed: int = 7,
) -> PlanSettings:
    return PlanSettings(steps, batch, accumulation, ranks, dropout, seed)


def plan_of(samples: Iterable[PlanInput], shape: PlanSettings) -> TrainingPlan:
    return TrainingPlan(PlanInputs.of(samples), shape)


def times_seen(plan: TrainingPlan) -> dict[str, int]:
    return {
        each.variant_id: times for each, times in zip(plan.inputs, plan.times_seen().tolist(), strict=True)
    }


def samples_of(sizes: dict[str, int], repeats: int = 1) -> list[PlanInput]:
    return [PlanInput(f"{b}/{i:03}", b, repeats) for b, size in sizes.items() for i in range(size)]


buckets = st.dictionaries(st.sampled_from(["64x64", "64x128", "128x64"]), st.integers(1, 9), min_size=1)
shapes = st.builds(
    settings_of,
    steps=st.integers(1, 25),
    batch=st.integers(1, 4),
    accumulation=st.integers(1, 4),
    ranks=st.sampled_from([1, 2, 4]),
    dropout=st.floats(0, 1),
    seed=st.integers(0, 2**63),
)


@st.composite
def samples_with_repeats(draw: st.DrawFn) -> list[PlanInput]:
    return [PlanInput(s.variant_id, s.bucket, draw(st.integers(1, 3))) for s in samples_of(draw(buckets))]


def epoch_slots(plan: TrainingPlan, epoch: int) -> list[Slot]:
    first = epoch * plan.steps_per_epoch
    return [slot for step in plan[first : first + plan.steps_per_epoch] for slot in step.slots()]


@given(samples_with_repeats(), shapes)
def test_B01_B07_each_epoch_contains_every_sample_repeats_times(
    samples: list[PlanInput], shape: PlanSettings
) -> None:
    probe = plan_of(samples, shape)
    plan = plan_of(samples, settings_of(2 * probe.steps_per_epoch, *_shape(shape)))
    for epoch in (0, 1):
        counts = Counter(slot.variant_id for slot in epoch_slots(plan, epoch))
        assert counts == Counter({sample.variant_id: sample.repeats for sample in samples})
        assert {slot.epoch for slot in epoch_slots(plan, epoch)} == {epoch}
    assert times_seen(plan) == {sample.variant_id: 2 * sample.repeats for sample in samples}


def _shape(shape: PlanSettings) -> tuple[int, int, int, float, int]:
    return (
        shape.batch_size,
        shape.gradient_accumulation,
        shape.num_processes,
        shape.caption_dropout,
        shape.seed,
    )


@given(samples_with_repeats(), shapes)
def test_B09_each_rank_has_a_share_of_the_same_bucket_in_every_micro_batch(
    samples: list[PlanInput], shape: PlanSettings
) -> None:
    bucket_of = {sample.variant_id: sample.bucket for sample in samples}
    for step in plan_of(samples, shape):
        assert 1 <= len(step.micro_batches) <= shape.gradient_accumulation
        for micro in step.micro_batches:
            where = f"step {step.step}, shares {[[slot.variant_id for slot in share] for share in micro]}"
            assert len(micro) == shape.num_processes, where
            assert [len(share) for share in micro if not 1 <= len(share) <= shape.batch_size] == [], where
            buckets = [{bucket_of[slot.variant_id] for slot in share} for share in micro]
            assert buckets == [buckets[0]] * shape.num_processes, where
            assert len(buckets[0]) == 1, where
            empty = [share for share in micro if all(slot.weight == 0.0 for slot in share)]
            assert [len(share) for share in empty] == [1] * len(empty), where


@given(samples_with_repeats(), shapes)
def test_R03_the_plan_has_the_exact_number_of_steps_and_weights_samples_equally(
    samples: list[PlanInput], shape: PlanSettings
) -> None:
    plan = plan_of(samples, shape)
    steps = list(plan)
    assert len(steps) == len(plan) == shape.steps
    for step in steps:
        weights = [slot.weight for micro in step.micro_batches for share in micro for slot in share]
        assert sum(weights) == step.num_samples >= 1, f"step {step.step}"
        assert [slot.index for slot in step.slots()] == list(range(step.num_samples)), f"step {step.step}"


@given(samples_with_repeats(), shapes, st.data())
def test_R01_R02_iterating_from_any_step_gives_the_same_remaining_steps(
    samples: list[PlanInput], shape: PlanSettings, data: st.DataObject
) -> None:
    all_steps = list(plan_of(samples, shape).iterate())
    cut = data.draw(st.integers(0, shape.steps))
    fresh = plan_of(reversed(samples), shape)
    assert list(fresh.iterate(cut)) == all_steps[cut:]
    assert {(type(step), type(batch)) for step, batch in all_steps} <= {(int, StepPlan)}
    assert [step for step, _ in all_steps] == list(range(shape.steps))


@given(samples_with_repeats(), st.integers(1, 3), st.integers(0, 9))
def test_world_sizes_1_2_and_4_give_the_same_global_batches_for_one_global_batch_size(
    samples: list[PlanInput], accumulation: int, seed: int
) -> None:
    def batches(ranks: int) -> list[list[Slot]]:
        shape = settings_of(9, 4 // ranks, accumulation, ranks, seed=seed)
        return [step.slots() for step in plan_of(samples, shape)]

    assert batches(1) == batches(2) == batches(4)


def test_accumulation_splits_one_large_batch_of_a_bucket() -> None:
    samples = samples_of({"64x64": 11})
    large = plan_of(samples, settings_of(4, batch=8))
    windows = plan_of(samples, settings_of(4, batch=2, accumulation=4))
    assert [step.slots() for step in large] == [step.slots() for step in windows]
    assert [step.num_samples for step in windows] == [8, 3, 8, 3]
    assert [len(step.micro_batches) for step in windows] == [4, 2, 4, 2]


def test_B02_the_partial_micro_batch_contains_other_samples_in_each_epoch() -> None:
    plan = plan_of(samples_of({"64x64": 9}), settings_of(60, batch=4))
    last = {plan[epoch * 3 + 2].slots()[0].variant_id for epoch in range(20)}
    assert len(last) > 4


def test_a_rank_without_a_sample_gets_a_placeholder_of_weight_zero() -> None:
    plan = plan_of(samples_of({"64x64": 1}), settings_of(1, batch=2, ranks=2))
    (micro,) = plan[0].micro_batches
    assert [[slot.weight for slot in share] for share in micro] == [[1.0], [0.0]]
    assert plan[0].num_samples == 1


@pytest.mark.parametrize(("dropout", "low", "high"), [(0.0, 0, 0), (0.1, 60, 140), (1.0, 1000, 1000)])
def test_T02_the_fraction_of_dropped_captions_matches_caption_dropout(
    dropout: float, low: int, high: int
) -> None:
    # 1000 independent draws of 0.1 have a standard deviation of 9.5, so 40 is more than four deviations.
    plan = plan_of(samples_of({"64x64": 100}), settings_of(500, batch=2, dropout=dropout))
    dropped = sum(slot.drop_caption for step in plan for slot in step.slots())
    assert low <= dropped <= high


def test_caption_dropout_depends_on_sample_and_epoch_but_not_on_batching() -> None:
    samples = samples_of({"64x64": 7, "64x128": 5}, repeats=2)

    def choices(batch: int, accumulation: int, ranks: int) -> dict[tuple[str, int, int], bool]:
        plan = plan_of(samples, settings_of(200, batch, accumulation, ranks, dropout=0.5))
        slots = [slot for epoch in (0, 1, 2) for slot in epoch_slots(plan, epoch)]
        return {(slot.variant_id, slot.epoch, slot.occurrence): slot.drop_caption for slot in slots}

    assert choices(1, 1, 1) == choices(3, 2, 2) == choices(4, 1, 4)


def test_another_seed_gives_another_order() -> None:
    samples = samples_of({"64x64": 12})
    orders = [[s.slots() for s in plan_of(samples, settings_of(6, seed=seed))] for seed in (1, 2)]
    assert orders[0] != orders[1]


def test_the_order_equals_the_stored_order_that_resumed_runs_rely_on() -> None:
    plan = plan_of(samples_of({"a": 3, "b": 2}), settings_of(4, seed=42, dropout=0.5))
    actual = [[(slot.variant_id, slot.drop_caption) for slot in step.slots()] for step in plan]
    assert actual == GOLDEN


GOLDEN: list[list[tuple[str, bool]]] = [
    [("a/001", True), ("a/000", False)],
    [("a/002", True)],
    [("b/001", True), ("b/000", False)],
    [("a/002", False), ("a/001", True)],
]


FOUR_BUCKETS = [
    *(PlanInput(f"a/{number:02}", "64x64", 2, 3, 2, dataset="a") for number in range(9)),
    *(PlanInput(f"b/{number:02}", "64x128", dataset="b") for number in range(7)),
    *(PlanInput(f"c/{number:02}", "64x64", dataset="b", references="1") for number in range(5)),
    *(
        PlanInput(f"d/{number:02}", "64x64", 3, dataset="b", slider=1, pair=f"{number}")
        for number in range(4)
    ),
    *(
        PlanInput(f"e/{number:02}", "64x64", 3, dataset="a", slider=-1, pair=f"{number}")
        for number in range(4)
    ),
]
WEIGHTS = {"a": 3.0, "b": 1.0}

STORED: list[tuple[Underfilled, dict[str, float], Exhausted, str]] = [
    ("partial", {}, "leave", "f4e7ef1fd3b06e5b"),
    ("repeat", {}, "leave", "8b1b80f01bbce993"),
    ("drop", {}, "leave", "2e11fa3648167717"),
    ("partial", WEIGHTS, "leave", "ad61a05115975d64"),
    ("drop", WEIGHTS, "end_epoch", "881601807b4467ab"),
    ("repeat", WEIGHTS, "repeat", "70366786c0cd0b41"),
]
"""Policies, weights, and the hash of the plan as of 2026-11-25."""


@pytest.mark.parametrize(
    ("policy", "weights", "exhausted", "stored"),
    STORED,
    ids=[f"{p}, {e}" if w else p for p, w, e, _ in STORED],
)
def test_R01_every_slot_of_every_step_equals_that_of_earlier_versions(
    policy: Underfilled, weights: dict[str, float], exhausted: Exhausted, stored: str
) -> None:
    shape = settings_of(40, batch=2, accumulation=2, ranks=2, dropout=0.4)
    plan = plan_of(FOUR_BUCKETS, replace(shape, underfilled=policy, weights=weights, exhausted=exhausted))
    steps = [asdict(step) for step in plan]
    text = json.dumps([steps, [plan.dropped(epoch) for epoch in range(plan.num_epochs)]])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == stored


@pytest.mark.parametrize(
    ("policy", "numbers"),
    [
        (
            "partial",
            {
                "draws_per_epoch": 15,
                "micro_batches_per_epoch": 5,
                "underfilled_micro_batches": 2,
                "filled": 0.75,
            },
        ),
        (
            "repeat",
            {
                "draws_per_epoch": 15,
                "micro_batches_per_epoch": 5,
                "underfilled_micro_batches": 2,
                "filled": 1.0,
            },
        ),
        (
            "drop",
            {
                "draws_per_epoch": 12,
                "micro_batches_per_epoch": 3,
                "dropped_per_epoch": 3,
                "filled": 1.0,
                "underfilled_micro_batches": 2,
                "steps_per_epoch": 2,
                "epochs": 5.5,
            },
        ),
    ],
)
def test_the_numbers_of_a_plan_describe_its_epochs(
    policy: Underfilled, numbers: dict[str, int | float]
) -> None:
    """Micro-batches of 4: a bucket of 8 draws fills two of them, and buckets of 5 and 2 have a remainder."""
    samples = [*samples_of({"64x64": 4}, repeats=2), *samples_of({"64x128": 5, "32x96": 2})]
    plan = plan_of(samples, replace(settings_of(11, batch=2, accumulation=2, ranks=2), underfilled=policy))
    assert plan.numbers() == {
        "steps": 11,
        "epochs": 3.667,
        "steps_per_epoch": 3,
        "dropped_per_epoch": 0,
        "global_batch_size": 8,
        "underfilled": policy,
        **numbers,
    }


def test_the_number_of_epochs_of_a_weighted_plan_counts_the_steps_of_each_epoch() -> None:
    """An epoch has 10 draws of a, and 3 or 4 of b: 13.3 on average, in micro-batches of 1."""
    samples = [PlanInput(f"{name}/{number}", "64x64", dataset=name) for name in "ab" for number in range(10)]
    shape = replace(settings_of(20, batch=1), weights=WEIGHTS, exhausted="end_epoch")
    plan = plan_of(samples, shape)
    assert plan.steps_per_epoch == 13
    assert plan.numbers()["epochs"] == round(1 + 7 / 13, 3)
    assert plan_of(samples, replace(shape, steps=33)).numbers()["epochs"] == round(2 + 7 / 14, 3)
    assert plan_of(samples, replace(shape, steps=13)).num_epochs == 1
    assert plan_of(samples, replace(shape, steps=14)).num_epochs == 2


def test_a_slice_of_a_plan_has_its_steps() -> None:
    plan = plan_of(FOUR_BUCKETS, settings_of(9))
    assert plan[2:7:2] == [plan[2], plan[4], plan[6]]
    assert plan[-2:] == [plan[7], plan[8]]


@pytest.mark.parametrize(
    ("samples", "shape", "message"),
    [
        ([], settings_of(), "no sample"),
        (samples_of({"a": 1}) * 2, settings_of(), "duplicate sample id"),
        (samples_of({"a": 1}), settings_of(steps=0), "at least 1"),
        (samples_of({"a": 1}, repeats=0), settings_of(), "at least 1"),
        (samples_of({"a": 1}), settings_of(batch=0), "at least 1"),
        (samples_of({"a": 1}), settings_of(accumulation=0), "at least 1"),
        (samples_of({"a": 1}), settings_of(ranks=0), "at least 1"),
        ([PlanInput("a", "a", variants=0)], settings_of(), "at least 1"),
        ([PlanInput("a", "a"), PlanInput("b", "a", views=0)], settings_of(), "at least 1"),
        (samples_of({"a": 1}), settings_of(dropout=1.5), "1.5"),
        (samples_of({"a": 1}), settings_of(dropout=-0.5), "-0.5"),
    ],
    ids=[
        "no samples",
        "a sample twice",
        "no steps",
        "no repeats",
        "no batch",
        "no accumulation",
        "no process",
        "no caption",
        "no latent",
        "dropout above 1",
        "dropout below 0",
    ],
)
def test_invalid_inputs_raise_training_errors(
    samples: list[PlanInput], shape: PlanSettings, message: str
) -> None:
    with pytest.raises(TrainingError, match=message):
        plan_of(samples, shape)


def test_an_index_beyond_the_plan_raises_an_index_error() -> None:
    plan = plan_of(samples_of({"a": 3}), settings_of(4))
    assert plan[-1] == plan[3]
    for index in (4, -5):
        with pytest.raises(IndexError, match="plan of 4 steps"):
            plan[index]


policies = st.sampled_from(["repeat", "drop"])


@given(samples_with_repeats(), shapes, policies)
def test_B01_with_repeat_or_drop_every_micro_batch_is_full(
    samples: list[PlanInput], shape: PlanSettings, policy: Underfilled
) -> None:
    capacity = shape.batch_size * shape.num_processes
    sizes = Counter[str]()
    for sample in samples:
        sizes[sample.bucket] += sample.repeats
    if policy == "drop" and max(sizes.values()) < capacity:
        with pytest.raises(TrainingError, match="no bucket fills a batch"):
            plan_of(samples, replace(shape, underfilled=policy))
        return
    plan = plan_of(samples, replace(shape, underfilled=policy))
    bucket_of = {sample.variant_id: sample.bucket for sample in samples}
    for _, step in plan.iterate():
        for micro in step.micro_batches:
            slots = [slot for share in micro for slot in share]
            where = f"step {step.step}, samples {[slot.variant_id for slot in slots]}"
            assert len(slots) == capacity, where
            assert {slot.weight for slot in slots} == {1.0}, where
            assert len({bucket_of[slot.variant_id] for slot in slots}) == 1, where


@given(samples_with_repeats(), shapes)
def test_repeat_uses_each_sample_in_every_epoch_and_fills_batches_evenly(
    samples: list[PlanInput], shape: PlanSettings
) -> None:
    probe = plan_of(samples, replace(shape, underfilled="repeat"))
    plan = plan_of(samples, replace(probe.settings, steps=probe.steps_per_epoch))
    slots = epoch_slots(plan, 0)
    draws = Counter((slot.variant_id, slot.occurrence) for slot in slots)
    assert {draw: number for draw, number in draws.items() if number > 1} == {}, "drawn more than once"
    counts = Counter(slot.variant_id for slot in slots)
    assert counts == Counter(times_seen(plan))
    for bucket in {sample.bucket for sample in samples}:
        turns = [counts[s.variant_id] / s.repeats for s in samples if s.bucket == bucket]
        assert min(turns) >= 1
        assert max(turns) - min(turns) <= 1


@given(samples_with_repeats(), shapes)
def test_B02_dropped_samples_are_listed_and_rotate(samples: list[PlanInput], shape: PlanSettings) -> None:
    """Over as many epochs as a bucket has draws, every draw is dropped equally often."""
    capacity = shape.batch_size * shape.num_processes
    sizes = Counter[str]()
    for sample in samples:
        sizes[sample.bucket] += sample.repeats
    if max(sizes.values()) < capacity:
        return
    probe = plan_of(samples, replace(shape, underfilled="drop"))
    epochs = math.lcm(*sizes.values())
    if epochs * probe.steps_per_epoch > 600:
        return
    plan = plan_of(samples, replace(probe.settings, steps=epochs * probe.steps_per_epoch))
    everything = Counter({sample.variant_id: sample.repeats for sample in samples})
    dropped = Counter[str]()
    for epoch in range(epochs):
        dropped_in_epoch = plan.dropped(epoch)
        counts = Counter(slot.variant_id for slot in epoch_slots(plan, epoch))
        assert counts + Counter(dropped_in_epoch) == everything
        dropped.update(dropped_in_epoch)
    for sample in samples:
        size = sizes[sample.bucket]
        assert dropped[sample.variant_id] == sample.repeats * epochs * (size % capacity) / size


def test_samples_are_dropped_only_with_the_drop_policy() -> None:
    plan = plan_of(samples_of({"64x64": 5}), settings_of(batch=2))
    assert plan.dropped(0) == {}
    assert plan.numbers()["dropped_per_epoch"] == 0
    dropping = replace(settings_of(batch=2), underfilled="drop")
    assert plan_of(samples_of({"64x64": 5}), dropping).dropped(0)


def with_choices(samples: list[PlanInput]) -> list[PlanInput]:
    return [replace(sample, variants=3, views=2) for sample in samples]


@given(samples_with_repeats(), shapes)
def test_variants_and_views_depend_on_sample_and_epoch_and_leave_the_plan_unchanged(
    samples: list[PlanInput], shape: PlanSettings
) -> None:
    plain, rich = plan_of(samples, shape), plan_of(with_choices(samples), shape)
    for before, after in zip(plain, rich, strict=True):
        assert [replace(slot, variant=0, view=0) for slot in after.slots()] == before.slots()
    one_by_one = plan_of(with_choices(samples), replace(shape, batch_size=1, gradient_accumulation=1))
    actual = {(s.variant_id, s.epoch, s.occurrence): (s.variant, s.view) for s in epoch_slots(one_by_one, 0)}
    for slot in epoch_slots(rich, 0):
        if (slot.variant_id, slot.epoch, slot.occurrence) in actual:
            assert actual[slot.variant_id, slot.epoch, slot.occurrence] == (slot.variant, slot.view)


def test_variants_views_and_dropout_are_uniform_and_independent() -> None:
    samples = [PlanInput(f"a/{number:03}", "64x64", variants=3, views=2) for number in range(100)]
    counts = Counter(
        (slot.variant, slot.view, slot.drop_caption)
        for step in plan_of(samples, settings_of(600, batch=2, dropout=0.5))
        for slot in step.slots()
    )
    # 1200 draws in 12 equal classes have a mean of 100 and a standard deviation of 9.6.
    assert len(counts) == 12, f"classes (variant, view, dropped caption) that occur: {sorted(counts)}"
    assert {each: number for each, number in counts.items() if not 60 <= number <= 140} == {}


@given(samples_with_repeats(), shapes, st.data())
def test_samples_that_are_left_out_change_no_slot_of_another_one(
    samples: list[PlanInput], shape: PlanSettings, data: st.DataObject
) -> None:
    """Index, epoch and occurrence seed the noise, and the number of samples divides the loss."""
    names = [each.variant_id for each in samples]
    left_out = data.draw(st.frozensets(st.sampled_from(names)))
    complete, plan = plan_of(samples, shape), plan_of(samples, replace(shape, left_out=left_out))
    for before, after in zip(complete, plan, strict=True):
        assert (after.step, after.epoch, after.num_samples) == (before.step, before.epoch, before.num_samples)
        assert after.slots() == [slot for slot in before.slots() if slot.variant_id not in left_out]
        # Their places stay, so that all micro-batches have their sizes.
        assert [[len(share) for share in micro] for micro in after.micro_batches] == [
            [len(share) for share in micro] for micro in before.micro_batches
        ]
