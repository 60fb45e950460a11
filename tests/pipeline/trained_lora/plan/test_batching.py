from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.trained_lora.plan.batching import Epochs, Underfilled
from pipeline.trained_lora.plan.inputs import PlanInput, PlanInputs
from pipeline.trained_lora.plan.mixing import Draws, Mix

Draw = tuple[str, int]
"""Name and occurrence of a sample."""


def samples_of(sizes: list[int], dataset: str = "a", repeats: int = 1) -> list[PlanInput]:
    """Return samples in one bucket per size."""
    return [
        PlanInput(f"{dataset}/{bucket}/{number:04}", str(bucket), repeats, dataset=dataset)
        for bucket, size in enumerate(sizes)
        for number in range(size)
    ]


def micro_batches(samples: PlanInputs, mix: Mix, capacity: int, underfilled: Underfilled) -> list[list[Draw]]:
    """Return all micro-batches of epoch 0, in the order in which they run."""
    epoch = Epochs(mix, 7, capacity, underfilled).shuffled(0)
    return [named(samples, draws) for draws in epoch.micro_batches(0, len(epoch.order))]


def named(samples: PlanInputs, draws: Draws) -> list[Draw]:
    return list(zip(samples.ids_at(draws.places), draws.occurrences.tolist(), strict=True))


def bucket_of(draws: list[Draw]) -> str:
    (bucket,) = {name.split("/")[1] for name, _ in draws}
    return bucket


@pytest.mark.parametrize("weights", [{}, {"a": 1.0}], ids=["repeats", "weights"])
def test_each_bucket_keeps_the_order_of_its_draws_in_a_large_epoch(weights: dict[str, float]) -> None:
    samples = PlanInputs.of(samples_of([301, 205, 96]))
    mix = Mix(samples, 7, weights, "leave")
    batches = micro_batches(samples, mix, 2, "partial")
    for bucket, draws in mix.draws(0).items():
        of_bucket = [batch for batch in batches if bucket_of(batch) == bucket]
        assert [draw for batch in of_bucket for draw in batch] == named(samples, draws)
        assert {len(batch) for batch in of_bucket[:-1]} == {2}
    assert [bucket_of(batch) for batch in batches] != sorted(map(bucket_of, batches)), "turns are shuffled"


def test_in_a_large_epoch_the_sides_of_a_slider_alternate() -> None:
    sides = (("day", 1), ("night", -1))
    samples = PlanInputs.of(
        PlanInput(f"{name}/0/{number}", "0", dataset=name, slider=side, pair=str(number))
        for number in range(301)
        for name, side in sides
    )
    batches = micro_batches(samples, Mix(samples, 7, {}, "leave"), 2, "partial")
    names = [[name.split("/") for name, _ in batch] for batch in batches]
    for day, night in zip(names[::2], names[1::2], strict=True):
        assert {name for name, *_ in day} == {"day"}
        assert {name for name, *_ in night} == {"night"}
        assert [number for *_, number in day] == [number for *_, number in night]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(1, 5),
    st.sampled_from(["partial", "repeat"]),
)
def test_with_weights_a_micro_batch_runs_when_its_draws_are_due_on_average(
    sizes: list[int], other_sizes: list[int], capacity: int, underfilled: Underfilled
) -> None:
    """A draw that fills a micro-batch is due together with the last draw of its bucket."""
    samples = PlanInputs.of([*samples_of(sizes), *samples_of(other_sizes, "b", repeats=2)])
    mix = Mix(samples, 7, {"a": 3.0, "b": 1.0}, "leave")
    turns: list[tuple[float, str]] = []
    for bucket, draws in mix.draws(0).items():
        assert draws.due is not None
        due = draws.due.tolist()
        due += due[-1:] * (-len(due) % capacity if underfilled == "repeat" else 0)
        parts = [due[start : start + capacity] for start in range(0, len(due), capacity)]
        turns += [(sum(part) / len(part), bucket) for part in parts]
    expected = [bucket for _, bucket in sorted(turns)]
    assert [bucket_of(batch) for batch in micro_batches(samples, mix, capacity, underfilled)] == expected


def test_filling_draws_are_further_occurrences_of_the_first_draws() -> None:
    samples = PlanInputs.of(samples_of([2], repeats=2))
    mix = Mix(samples, 7, {}, "leave")
    first = named(samples, mix.draws(0)["0"])
    (batch,) = micro_batches(samples, mix, 11, "repeat")
    filling = [(name, occurrence + 2 * turn) for turn in (1, 2) for name, occurrence in first]
    assert batch == [*first, *filling[:7]]
