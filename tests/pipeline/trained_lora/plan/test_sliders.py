"""The two sides of a slider in the plan of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.trained_lora.plan.inputs import PlanInput, PlanInputs
from pipeline.trained_lora.plan.steps import PlanSettings, Slot, StepPlan, TrainingPlan

SETTINGS = PlanSettings(40, 2, 2, 1, 0.3, 7)
DAY = [
    PlanInput(f"day/{number}", bucket, variants=3, views=2, dataset="day", slider=1, pair=f"{number}")
    for number, bucket in enumerate(["64x64"] * 5 + ["32x96"] * 4)
]
NIGHT = [replace(sample, variant_id=f"night/{sample.pair}", dataset="night", slider=-1) for sample in DAY]
OTHER = [PlanInput(f"other/{number}", "64x64", dataset="other") for number in range(7)]


def names(share: tuple[Slot, ...]) -> tuple[str, list[str]]:
    """Return the dataset of a share's slots, and their names in it."""
    (dataset,) = {slot.variant_id.partition("/")[0] for slot in share}
    return dataset, [slot.variant_id.partition("/")[2] for slot in share]


def sides(step: StepPlan) -> list[tuple[str, list[str]]]:
    return [names(share) for micro in step.micro_batches for share in micro]


@pytest.mark.parametrize("weights", [{}, {"day": 1.0, "night": 1.0}], ids=["repeats", "weights"])
def test_a_step_of_two_micro_batches_has_the_same_pairs_on_both_sides(weights: dict[str, float]) -> None:
    plan = TrainingPlan(PlanInputs.of([*DAY, *NIGHT]), replace(SETTINGS, weights=weights))
    for step in plan:
        (first, pairs), (second, others) = sides(step)
        assert (first, second) == ("day", "night")
        assert pairs == others


def test_both_images_of_a_pair_get_the_same_caption_view_and_dropout() -> None:
    plan = TrainingPlan(PlanInputs.of([*DAY, *NIGHT]), SETTINGS)
    choices = {
        (slot.variant_id, slot.epoch): (slot.drop_caption, slot.variant, slot.view)
        for step in plan
        for slot in step.slots()
    }
    assert len(set(choices.values())) == 2 * 3 * 2
    for (variant_id, epoch), choice in choices.items():
        assert choices[variant_id.replace("day", "night"), epoch] == choice


@pytest.mark.parametrize("num_processes", [1, 3])
def test_a_micro_batch_never_has_both_sides_or_other_images(num_processes: int) -> None:
    settings = replace(SETTINGS, num_processes=num_processes)
    plan = TrainingPlan(PlanInputs.of([*DAY, *NIGHT, *OTHER]), settings)
    datasets = [{names(share)[0] for share in micro} for step in plan for micro in step.micro_batches]
    assert [each for each in datasets if len(each) != 1] == []
    assert set.union(*datasets) == {"day", "night", "other"}


def test_dropped_draws_are_the_same_pairs_on_both_sides() -> None:
    plan = TrainingPlan(PlanInputs.of([*DAY, *NIGHT]), replace(SETTINGS, underfilled="drop"))
    for epoch in range(4):
        dropped = plan.dropped(epoch)
        assert dropped
        day = {name.removeprefix("day/") for name in dropped if name.startswith("day/")}
        assert day == {name.removeprefix("night/") for name in dropped if name.startswith("night/")}


def test_images_without_a_partner_are_drawn_like_any_other() -> None:
    alone = [replace(sample, pair=None) for sample in [*DAY, *NIGHT]]
    seen = TrainingPlan(PlanInputs.of(alone), replace(SETTINGS, steps=5)).times_seen()
    assert seen.tolist() == [1] * len(alone)
