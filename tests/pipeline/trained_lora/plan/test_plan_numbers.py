"""The numbers of a plan, and plans whose epochs differ in their draws."""

from __future__ import annotations

import pytest

from pipeline.errors import TrainingError
from pipeline.trained_lora.plan.inputs import PlanInput, PlanInputs
from pipeline.trained_lora.plan.mixing import Mix
from pipeline.trained_lora.plan.steps import PlanSettings, Slot, TrainingPlan, plan_text


def samples_of(dataset: str, buckets: str) -> list[PlanInput]:
    """Return one sample per letter of `buckets`, which is its bucket."""
    return [PlanInput(f"{dataset}/{at}", bucket, dataset=dataset) for at, bucket in enumerate(buckets)]


def plan_of(samples: list[PlanInput], settings: PlanSettings) -> TrainingPlan:
    return TrainingPlan(PlanInputs.of(samples), settings)


def test_a_slot_shows_the_first_caption_and_latent_with_weight_1_unless_stated() -> None:
    stated = Slot("a", 2, 3, 4, drop_caption=True, variant=0, view=0, weight=1.0)
    assert Slot("a", 2, 3, 4, drop_caption=True) == stated


def test_the_filled_part_of_micro_batches_is_rounded_to_three_digits() -> None:
    settings = PlanSettings(1, 7, 1, 1, 0.0, 7)
    assert plan_of(samples_of("a", "xx"), settings).numbers()["filled"] == 0.286


def test_the_numbers_of_a_weighted_plan_describe_its_first_epoch() -> None:
    """Each epoch has four of b's ten samples, from two buckets; epochs before and after have other shares."""
    samples = [*samples_of("a", "x" * 9), *samples_of("b", "yyyyyzzzzz")]
    weights = {"a": 9.0, "b": 4.0}
    mix = Mix(PlanInputs.of(samples), 15, weights, "end_epoch")
    sizes = [mix.sizes(epoch) for epoch in (-1, 0, 1)]
    assert sizes == [{"x": 9, "y": 2, "z": 2}, {"x": 9, "y": 1, "z": 3}, {"x": 9, "y": 2, "z": 2}]

    plan = plan_of(samples, PlanSettings(11, 2, 1, 1, 0.0, 15, "drop", weights, "end_epoch"))
    assert [each.epoch for each in plan] == [0] * 5 + [1] * 6
    assert plan.numbers() == {
        "steps": 11,
        "epochs": 2.0,
        "steps_per_epoch": 5,
        "draws_per_epoch": 10,
        "micro_batches_per_epoch": 5,
        "underfilled_micro_batches": 3,
        "dropped_per_epoch": 3,
        "global_batch_size": 2,
        "filled": 1.0,
        "underfilled": "drop",
    }


def test_a_bucket_that_an_epoch_does_not_use_has_no_size_even_if_it_is_the_last() -> None:
    samples = PlanInputs.of([*samples_of("a", "x"), *samples_of("b", "yz")])
    mix = Mix(samples, 7, {"a": 1.0, "b": 1.0}, "end_epoch")
    sizes = [mix.sizes(epoch) for epoch in range(8)]
    assert {"x": 1, "y": 1} in sizes
    assert {"x": 1, "z": 1} in sizes


def test_only_the_epochs_that_a_plan_reaches_need_a_full_batch() -> None:
    """Each epoch has one of a's samples and two of b's; both are in one bucket in some epochs only."""
    samples = [*samples_of("a", "x"), *samples_of("b", "yyyzz")]
    weights = {"a": 1.0, "b": 2.0}
    for seed in range(20):
        mix = Mix(PlanInputs.of(samples), seed, weights, "end_epoch")
        full = [max(mix.sizes(epoch).values()) == 2 for epoch in range(2)]
        if full == [True, False]:
            break
    else:
        pytest.fail("no seed gives a full batch in the first of two epochs alone")

    def plan(steps: int) -> TrainingPlan:
        return plan_of(samples, PlanSettings(steps, 2, 1, 1, 0.0, seed, "drop", weights, "end_epoch"))

    assert plan(1)[0].num_samples == 2
    assert plan(1).num_epochs == 1
    with pytest.raises(TrainingError, match="no bucket fills a batch"):
        plan(2)


@pytest.mark.parametrize(
    ("policy", "changes", "text"),
    [
        ("partial", {"underfilled_micro_batches": 2}, "; 2 of 5 batches in each epoch are smaller"),
        (
            "repeat",
            {"underfilled_micro_batches": 1},
            "; 1 of 5 batches in each epoch is filled with repeated",
        ),
        ("drop", {"dropped_per_epoch": 3}, "; each epoch leaves out 3 samples (buckets.underfilled: drop)"),
        ("partial", {}, "4 samples per step"),
    ],
)
def test_the_numbers_of_a_plan_are_read_as_a_sentence(
    policy: str, changes: dict[str, int], text: str
) -> None:
    numbers = {"steps": 2000, "epochs": 1.25, "steps_per_epoch": 1, "micro_batches_per_epoch": 5}
    numbers |= {"underfilled_micro_batches": 0, "dropped_per_epoch": 0, "global_batch_size": 4}
    sentence = plan_text({**numbers, "underfilled": policy, **changes})
    assert sentence.startswith("2,000 steps (1.25 epochs of 1 step), 4 samples per step")
    assert text in sentence
    assert ("batches" in sentence) == bool(changes.get("underfilled_micro_batches"))
