from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import TrainingError
from pipeline.trained_lora.plan.inputs import PlanInput, PlanInputs
from pipeline.trained_lora.plan.mixing import Exhausted, Mix
from pipeline.trained_lora.plan.steps import PlanSettings, TrainingPlan

SETTINGS = PlanSettings(40, 2, 1, 1, 0.25, 7)

WEIGHTED: tuple[Exhausted, ...] = ("leave", "end_epoch", "repeat")


def dataset(name: str, number: int, buckets: Iterable[str] = ("64x64",), repeats: int = 1) -> list[PlanInput]:
    buckets = list(buckets)
    return [
        PlanInput(f"{name}/{index:03}", buckets[index % len(buckets)], repeats, dataset=name)
        for index in range(number)
    ]


class Draw(NamedTuple):
    due: float
    variant_id: str
    occurrence: int


class Mixed:
    """A mix that returns its draws with sample names."""

    def __init__(self, samples: list[PlanInput], weights: dict[str, float], exhausted: Exhausted) -> None:
        self.samples = PlanInputs.of(samples)
        self.mix = Mix(self.samples, 7, weights, exhausted)

    def draws(self, epoch: int) -> dict[str, list[Draw]]:
        return {
            bucket: [
                Draw(due, self.samples[place].variant_id, occurrence)
                for due, place, occurrence in zip(
                    draws.due.tolist(), draws.places.tolist(), draws.occurrences.tolist(), strict=True
                )
            ]
            for bucket, draws in self.mix.draws(epoch).items()
        }

    def in_order(self, epoch: int) -> list[Draw]:
        return sorted((draw for bucket in self.draws(epoch).values() for draw in bucket), key=lambda d: d.due)


def plan_of(samples: Iterable[PlanInput], shape: PlanSettings) -> TrainingPlan:
    return TrainingPlan(PlanInputs.of(samples), shape)


@st.composite
def mixes(draw: st.DrawFn) -> tuple[list[PlanInput], dict[str, float]]:
    samples = list[PlanInput]()
    weights = dict[str, float]()
    for name in "abc"[: draw(st.integers(1, 3))]:
        buckets = draw(st.lists(st.sampled_from(["64x64", "64x128"]), min_size=1, max_size=2))
        samples += dataset(name, draw(st.integers(1, 12)), buckets, draw(st.integers(1, 3)))
        weights[name] = draw(st.floats(0.05, 20))
    return samples, weights


@given(mixes(), st.sampled_from(WEIGHTED), st.integers(0, 3))
def test_sizes_match_the_draws_and_every_draw_is_unique(
    mix: tuple[list[PlanInput], dict[str, float]], exhausted: Exhausted, epoch: int
) -> None:
    mixed = Mixed(*mix, exhausted)
    draws = mixed.draws(epoch)
    assert {bucket: len(of) for bucket, of in draws.items()} == mixed.mix.sizes(epoch)
    times = Counter((draw.variant_id, draw.occurrence) for of in draws.values() for draw in of)
    assert len(times) >= 1
    assert {each: number for each, number in times.items() if number > 1} == {}, "drawn more than once"
    bucket_of = {sample.variant_id: sample.bucket for sample in mix[0]}
    for bucket, of in draws.items():
        assert {bucket_of[draw.variant_id] for draw in of} <= {bucket}, f"draws of bucket {bucket}"


@given(mixes())
def test_leave_draws_every_sample_once_per_epoch_for_any_weights(
    mix: tuple[list[PlanInput], dict[str, float]],
) -> None:
    samples, weights = mix
    counts = Counter(draw.variant_id for draw in Mixed(samples, weights, "leave").in_order(2))
    assert counts == Counter({sample.variant_id: sample.repeats for sample in samples})


@given(mixes(), st.sampled_from(["end_epoch", "repeat"]))
def test_over_many_epochs_datasets_follow_their_weights_and_samples_have_equal_shares(
    mix: tuple[list[PlanInput], dict[str, float]], exhausted: Exhausted
) -> None:
    samples, weights = mix
    mixed = Mixed(samples, weights, exhausted)
    counts = Counter[str]()
    for epoch in range(8):
        epoch_counts = Counter(draw.variant_id for of in mixed.draws(epoch).values() for draw in of)
        counts += epoch_counts
        drawn_by_dataset = {
            name: sum(n for s, n in epoch_counts.items() if s.startswith(name)) for name in weights
        }
        epoch_sizes = {n: sum(s.repeats for s in samples if s.dataset == n) for n in weights}
        progress = {name: drawn_by_dataset[name] / epoch_sizes[name] for name in weights}
        if exhausted == "end_epoch":
            assert max(progress.values()) == 1
        else:
            assert min(progress.values()) == 1
    total = sum(counts.values())
    for name in weights:
        dataset_counts = {s.variant_id: counts[s.variant_id] for s in samples if s.dataset == name}
        repeats = next(s.repeats for s in samples if s.dataset == name)
        assert max(dataset_counts.values()) - min(dataset_counts.values()) <= repeats
        # Draws are rounded to integers once over all epochs, not once per epoch.
        assert abs(sum(dataset_counts.values()) - total * weights[name] / sum(weights.values())) <= len(
            weights
        )


@given(mixes(), st.sampled_from(WEIGHTED), st.integers(0, 3))
def test_the_draws_of_a_dataset_are_evenly_spaced_by_its_share_of_the_weights(
    mix: tuple[list[PlanInput], dict[str, float]], exhausted: Exhausted, epoch: int
) -> None:
    weights = mix[1]
    draws = Mixed(*mix, exhausted).in_order(epoch)
    for name, weight in weights.items():
        due = [draw.due for draw in draws if draw.variant_id.startswith(name)]
        share = weight / sum(weights.values())
        assert due == pytest.approx([(place + 0.5) / share for place in range(len(due))])


def test_occurrences_count_the_appearances_of_a_sample_in_the_order_of_its_draws() -> None:
    mixed = Mixed([*dataset("a", 40), *dataset("b", 3, repeats=2)], {"a": 1, "b": 20}, "repeat")
    for epoch in range(2):
        occurrences: dict[str, list[int]] = {}
        for draw in mixed.in_order(epoch):
            occurrences.setdefault(draw.variant_id, []).append(draw.occurrence)
        assert max(map(len, occurrences.values())) > 200
        assert {name: each for name, each in occurrences.items() if each != list(range(len(each)))} == {}


@pytest.mark.parametrize("exhausted", WEIGHTED)
def test_every_prefix_of_an_epoch_follows_the_dataset_weights(exhausted: Exhausted) -> None:
    mixed = Mixed(dataset("a", 30) + dataset("b", 90), {"a": 3, "b": 1}, exhausted)
    names = [draw.variant_id[0] for draw in mixed.in_order(0)]
    for number, of_a in enumerate(accumulate(name == "a" for name in names[:40]), start=1):
        assert abs(of_a - number * 3 / 4) <= 0.5, f"{of_a} of the first {number} draws are of a"
    if exhausted == "leave":
        assert set(names[40:]) == {"b"}
        assert len(names) == 120
    elif exhausted == "end_epoch":
        assert Counter(names) == {"a": 30, "b": 10}
    else:
        assert Counter(names) == {"a": 270, "b": 90}


@given(mixes(), st.sampled_from(WEIGHTED), st.sampled_from(["partial", "repeat", "drop"]), st.data())
def test_R01_R02_R03_a_weighted_plan_is_exact_and_can_restart_at_any_step(
    mix: tuple[list[PlanInput], dict[str, float]], exhausted: Exhausted, policy: str, data: st.DataObject
) -> None:
    samples, weights = mix
    accumulation, steps = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 30))
    shape = replace(SETTINGS, steps=steps, gradient_accumulation=accumulation, weights=weights)
    shape = replace(shape, exhausted=exhausted, underfilled=policy)
    try:
        plan = plan_of(samples, shape)
    except TrainingError:
        assert policy == "drop", "no bucket fills a batch in one of the epochs"
        return
    all_steps = list(plan.iterate())
    assert [step for step, _ in all_steps] == list(range(steps)) == list(range(len(plan)))
    cut = data.draw(st.integers(0, steps))
    assert list(plan_of(reversed(samples), shape).iterate(cut)) == all_steps[cut:]
    epochs = [batch.epoch for _, batch in all_steps]
    assert epochs == sorted(epochs)
    assert plan.num_epochs == epochs[-1] + 1
    counts = Counter(slot.variant_id for _, batch in all_steps for slot in batch.slots())
    times = dict(zip(plan.inputs, plan.times_seen().tolist(), strict=True))
    assert Counter({sample.variant_id: number for sample, number in times.items()}) == counts
    for _, batch in all_steps:
        weights = [slot.weight for m in batch.micro_batches for share in m for slot in share]
        assert sum(weights) == batch.num_samples, f"step {batch.step}"
        assert 1 <= len(batch.micro_batches) <= accumulation, f"step {batch.step}"


@given(mixes(), st.sampled_from(WEIGHTED), st.integers(1, 4))
def test_steps_in_covers_the_given_number_of_complete_epochs(
    mix: tuple[list[PlanInput], dict[str, float]], exhausted: Exhausted, epochs: int
) -> None:
    samples, weights = mix
    shape = replace(SETTINGS, weights=weights, exhausted=exhausted)
    steps = TrainingPlan.steps_in(PlanInputs.of(samples), shape, epochs)
    longer = plan_of(samples, replace(shape, steps=steps + 1))
    assert [longer[steps - 1].epoch, longer[steps].epoch] == [epochs - 1, epochs]
    assert plan_of(samples, replace(shape, steps=steps)).numbers()["epochs"] == epochs


def test_a_weighted_plan_follows_the_weights_in_each_window_of_steps() -> None:
    samples = dataset("a", 40, ["64x64", "64x128"]) + dataset("b", 400, ["64x64", "64x128"])
    plan = plan_of(samples, replace(SETTINGS, steps=200, weights={"a": 1, "b": 1}, exhausted="repeat"))
    for start in range(0, 200, 20):
        names = Counter(slot.variant_id[0] for step in plan[start : start + 20] for slot in step.slots())
        assert 17 <= names["a"] <= 23
